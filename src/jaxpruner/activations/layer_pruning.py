"""What a pruned layer does at each call: the settings, checked once, and their use on inputs or outputs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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

    >>> double = lambda x: 2 * x
    >>> LayerPruning(density=0.5)('Dense_0', double, (jnp.array([[1.0, 3.0]]),), {})
    Array([[0., 6.]], dtype=float32)
    """

    # Either the share kept or an N:M pattern; the other is None.
    density: Any = None
    pattern: sparsity_types.NByM | None = None
    prune: str = 'outputs'  # or 'inputs'
    batch_axes: tuple[int, ...] | None = (0,)  # axes that count examples, as in prune_act_unstruct
    straight_through: bool = False  # gradients pass everywhere

    def __call__(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a layer and prunes; the name is for messages."""
        if self.prune == 'inputs':
            args, kwargs = self._with_pruned_input(name, args, kwargs)
            return function(*args, **kwargs)
        return self._pruned_outputs(name, function(*args, **kwargs))

    def _with_pruned_input(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        pruned = with_first_float_array(functools.partial(self._pruned, name), args, kwargs)
        if pruned is None:
            raise ValueError(
                f"layer {name!r} was called without a float array; prune its outputs: prune='outputs'"
            )
        return pruned

    def _pruned_outputs(self, name: str, outputs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(outputs)
        if not any(map(_is_prunable, leaves)):
            raise ValueError(
                f'layer {name!r} returned no float array of at least one dimension, so there is nothing to prune '
                '(a function may be mapped over single activations, as in equinox.nn.MLP); choose other layers, or '
                "the layers after it with prune='inputs'"
            )
        pruned = [self._pruned(name, leaf) if _is_prunable(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(treedef, pruned)

    def _pruned(self, name: str, x: Any) -> jax.Array:
        try:
            if self.pattern is not None:
                return pruning.keep_groups(
                    jnp.asarray(x), self.pattern, self.straight_through, name
                )
            return pruning.prune_act_unstruct(
                x, self.density, batch_axes=self.batch_axes, straight_through=self.straight_through
            )
        except ValueError as error:
            raise ValueError(f'layer {name!r}: {error}') from error


def with_first_float_array(
    function: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """Arguments whose first float array of at least one dimension went through a function; None if there is none."""
    for position, value in enumerate(args):
        if _is_prunable(value):
            return (*args[:position], function(value), *args[position + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_prunable(value):
            return args, {**kwargs, name: function(value)}
    return None


def read_pruning(
    *,
    density: Any,
    pattern: Any,
    prune: str,
    batch_axes: int | Sequence[int] | str | None,
    axis: int | None,
    straight_through: bool,
    default_batch_axes: int | None,
) -> LayerPruning:
    """Checks the settings of `sparsify_activations`; `batch_axes='auto'` means `default_batch_axes`.

    Raises:
      ValueError: both or none of density and pattern, a setting of the other one, or a value out of its range.
      TypeError: a value of the wrong type.
    """
    if (density is None) == (pattern is None):
        got = 'neither' if density is None else f'density={density!r} and pattern={pattern!r}'
        raise ValueError(
            f"give one of density (such as 0.5) and pattern (such as '2:4'), got {got}"
        )
    if prune not in _PRUNED:
        raise ValueError(f"prune must be 'outputs' or 'inputs', got {prune!r}")
    pruning.check_straight_through(straight_through)
    is_auto = isinstance(batch_axes, str) and batch_axes == 'auto'
    if isinstance(batch_axes, str) and not is_auto:
        raise ValueError(
            f"batch_axes must be a whole number, some of them, None or 'auto', got {batch_axes!r}"
        )
    if pattern is not None:
        if not is_auto:
            raise ValueError(
                f'batch_axes={batch_axes!r} means nothing with a pattern, whose groups lie along axis'
            )
        n_by_m = sparsity_types.parse_n_by_m(pattern, axis)
        return LayerPruning(pattern=n_by_m, prune=prune, straight_through=straight_through)
    if axis is not None:
        raise ValueError(
            f'axis={axis!r} means nothing with a density, which ranks whole examples: see batch_axes'
        )
    sparsity_distributions.check_density(density, 'density')
    density = density if tree_lib.is_traced(density) else float(density)
    axes = pruning.read_batch_axes(default_batch_axes if is_auto else batch_axes)
    return LayerPruning(density, None, prune, axes, straight_through)


def _is_prunable(value: Any) -> bool:
    return (
        isinstance(value, jax.Array | np.ndarray)
        and value.ndim > 0
        and jnp.issubdtype(value.dtype, jnp.inexact)
    )
