"""What a pruned layer does at each call: the settings, checked once, and their use on inputs or outputs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.activations import pruning

_PRUNED = ('inputs', 'outputs')


@dataclasses.dataclass(frozen=True)
class LayerPruning:
    """Prunes what layers return, or the first float array that they are given.

    Attributes:
      density: share kept, or `None`.
      pattern: N:M pattern, or `None`; one of the two is set.
      prune: `'outputs'` or `'inputs'`.
      batch_axes: axes that count examples, as in `prune_act_unstruct`.
      straight_through: gradients pass everywhere.

    >>> double = lambda x: 2 * x
    >>> LayerPruning(density=0.5)('Dense_0', double, (jnp.array([[1.0, 3.0]]),), {})
    Array([[0., 6.]], dtype=float32)
    """

    density: Any = None
    pattern: sparsity_types.NByM | None = None
    prune: str = 'outputs'
    batch_axes: tuple[int, ...] | None = (0,)
    straight_through: bool = False

    def __call__(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the layer that is known by a name, and prunes."""
        if self.prune == 'inputs':
            args, kwargs = self._with_pruned_input(name, args, kwargs)
            return function(*args, **kwargs)
        return self._pruned_outputs(name, function(*args, **kwargs))

    def _with_pruned_input(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = list(args), dict(kwargs)
        for arguments, keys in ((args, range(len(args))), (kwargs, list(kwargs))):
            for key in keys:
                if _is_prunable(arguments[key]):
                    arguments[key] = self._pruned(name, arguments[key])
                    return args, kwargs
        raise ValueError(f"layer {name!r} was called without a float array; prune its outputs: prune='outputs'")

    def _pruned_outputs(self, name: str, outputs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(outputs)
        prunable = [_is_prunable(leaf) for leaf in leaves]
        if not any(prunable):
            raise ValueError(
                f'layer {name!r} returned no float array of at least one dimension, so there is nothing to prune '
                '(a function may be mapped over single activations, as in equinox.nn.MLP); choose other layers, or '
                "the layers after it with prune='inputs'"
            )
        pairs = zip(leaves, prunable, strict=True)
        return jax.tree.unflatten(treedef, [self._pruned(name, leaf) if prune else leaf for leaf, prune in pairs])

    def _pruned(self, name: str, x: Any) -> jax.Array:
        try:
            if self.pattern is not None:
                return pruning._keep_groups(jnp.asarray(x), self.pattern, self.straight_through, f'layer {name!r}: ')
            return pruning.prune_act_unstruct(
                x, self.density, batch_axes=self.batch_axes, straight_through=self.straight_through
            )
        except ValueError as error:
            raise ValueError(f'layer {name!r}: {error}') from error


def read_pruning(
    density: Any,
    pattern: Any,
    prune: str,
    batch_axes: int | Sequence[int] | None,
    axis: int,
    straight_through: bool,
) -> LayerPruning:
    """Checks the settings of `sparsify_activations`.

    Raises:
      ValueError: both or none of density and pattern, or a value out of its range.
      TypeError: a value of the wrong type.

    >>> read_pruning(None, '2:4', 'inputs', 0, -1, False).pattern
    NByM(n=2, m=4, axis=-1, allow_partial=True)
    """
    if (density is None) == (pattern is None):
        got = 'neither' if density is None else f'density={density!r} and pattern={pattern!r}'
        raise ValueError(f"give one of density (such as 0.5) and pattern (such as '2:4'), got {got}")
    if prune not in _PRUNED:
        raise ValueError(f"prune must be 'outputs' or 'inputs', got {prune!r}")
    if not isinstance(straight_through, bool):
        raise TypeError(f'straight_through must be True or False, got {straight_through!r}')
    if density is not None:
        sparsity_distributions.check_density(density, 'density')
        density = density if tree_lib.is_traced(density) else float(density)
    n_by_m = None if pattern is None else sparsity_types.parse_n_by_m(pattern, axis)
    return LayerPruning(density, n_by_m, prune, _read_axes(batch_axes), straight_through)


def _read_axes(batch_axes: Any) -> tuple[int, ...] | None:
    if batch_axes is None:
        return None
    axes = tuple(batch_axes) if isinstance(batch_axes, list | tuple) else (batch_axes,)
    if not all(isinstance(axis, int | np.integer) and not isinstance(axis, bool) for axis in axes):
        raise TypeError(f'batch_axes must be a whole number, some of them, or None, got {batch_axes!r}')
    return tuple(map(int, axes))


def _is_prunable(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and value.ndim > 0 and jnp.issubdtype(value.dtype, jnp.inexact)
