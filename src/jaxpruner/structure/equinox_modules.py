"""Modules of Equinox: pytrees of arrays and other values. Batch statistics are in an `equinox.nn.State`, an input."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from jaxpruner.structure.modules import ModelArrays
from jaxpruner.tree import PyTree

_ONE_EXAMPLE = (
    'A module of Equinox takes one example. jaxpruner.shrink maps it over a batch with '
    'call=lambda module, x: jax.vmap(module)(x).'
)


def arrays_of(
    module: Any, inputs: tuple[Any, ...], call: Callable[..., Any] | None
) -> ModelArrays | None:
    """The arrays of a module, and the `equinox.nn.State` among its inputs; `None` if the module has no arrays."""
    params, rest = eqx.partition(module, eqx.is_array)
    if not jax.tree.leaves(params):
        return None
    positions = [i for i, value in enumerate(inputs) if isinstance(value, eqx.nn.State)]
    state = inputs[positions[0]] if positions else None

    def make(params: PyTree, state: PyTree) -> Any:
        del state  # an input
        return eqx.combine(params, rest)

    def run(module: Any, state: PyTree, *inputs: Any) -> Any:
        if positions:
            inputs = (*inputs[: positions[0]], state, *inputs[positions[0] :])
        module = eqx.nn.inference_mode(module)
        if call is not None:
            return call(module, *inputs)
        try:
            return module(*inputs)
        except Exception as error:
            error.add_note(_ONE_EXAMPLE)
            raise

    return ModelArrays(
        params=params,
        state=state,
        inputs=tuple(value for i, value in enumerate(inputs) if i not in positions[:1]),
        make=make,
        run=run,
    )
