"""What the tables of models share: how a model is made, and a short form of its uses.

`'dot 0>1'` is a contraction of axis 0 with axis 1 free; `|2` names batch axes, `@0` stacked ones, and `~` says that the
operand is computed from the leaf.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as shapes, and what is expected of its leaves.

    Attributes:
      make: nothing -> apply function, parameters, inputs; shapes will do.
      expected: glob of leaves -> their uses in short form, split by commas; the first that matches counts.
      flops: of the whole model, counted by hand; `None` where it is not counted.
      unused: globs of leaves that are not used.
    """

    make: Callable[[], tuple[Callable[..., Any], Any, tuple[Any, ...]]]
    expected: dict[str, str]
    flops: int | None = None
    unused: tuple[str, ...] = ()


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def short(use) -> str:
    axes = [''.join(map(str, axes)) for axes in (use.contract, use.free, use.batch, use.stack)]
    text = f'{"" if use.exact else "~"}{use.op} {axes[0]}>{axes[1]}'
    return text + (f'|{axes[2]}' if axes[2] else '') + (f'@{axes[3]}' if axes[3] else '')


def short_uses(graph) -> dict[str, str]:
    return {
        tree.path_string(path): ', '.join(sorted({short(use) for use in uses}))
        for path, uses in graph.items()
    }


def expected_uses(model: Model, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        glob = next(
            (glob for glob in model.expected if tree.matches(glob, tuple(name.split('/')))), None
        )
        if glob is not None:
            found[name] = ', '.join(
                sorted(part.strip() for part in model.expected[glob].split(','))
            )
    return found


BIAS = 'elementwise >0'
ATTENTION = {
    '*attention/out/kernel': 'dot 01>2',
    '*attention/*/kernel': 'dot 0>12',
    '*attention/out/bias': BIAS,
    '*attention/*/bias': 'elementwise >01',
}
REST = {'*/kernel': 'dot 0>1', '*/bias': BIAS, '*/scale': BIAS}


def stacked(expected):
    """The same in a stack of layers: all axes are one further."""
    rows = {}
    for glob, text in expected.items():
        op, axes = text.split()
        rows[glob] = f'{op} {"".join(str(int(c) + 1) if c.isdigit() else c for c in axes)}@0'
    return rows


def rotary(x):
    """Rotates pairs of features of (batch, time, heads, features) by angles that grow with time."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
