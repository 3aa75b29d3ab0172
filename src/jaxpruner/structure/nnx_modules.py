"""Modules of Flax NNX: a graph, parameters, and other arrays such as batch statistics."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxpruner.structure.modules import ModelArrays
from jaxpruner.tree import PyTree


def arrays_of(module: Any, inputs: tuple[Any, ...], call: Callable[..., Any] | None) -> ModelArrays:
    """The arrays of a module. The keys of its random numbers stay in it."""
    graphdef, params, keys, state = nnx.split(module, nnx.Param, nnx.RngState, ...)

    def make(params: PyTree, state: PyTree) -> Any:
        parts = (params, keys) if state is None else (params, keys, state)
        # The module may take the variables as they are, so that others would see what it changes.
        return nnx.merge(graphdef, *jax.tree.map(lambda array: array, parts))

    def run(module: Any, state: PyTree, *inputs: Any) -> Any:
        del state  # the module holds it
        module.eval()
        return module(*inputs) if call is None else call(module, *inputs)

    return ModelArrays(
        params=params,
        state=state if jax.tree.leaves(state) else None,
        inputs=inputs,
        make=make,
        run=run,
    )


def shrunk_optimizer(
    optimizer: Any, shrink: Callable[[PyTree], PyTree], model: Any
) -> nnx.Optimizer | None:
    """An `nnx.Optimizer` whose arrays are shrunk; `None` for anything else. One that holds the model gets this one."""
    if not isinstance(optimizer, nnx.Optimizer):
        return None
    graphdef, state = nnx.split(optimizer)
    small: Any = nnx.merge(graphdef, shrink(state))
    if 'model' in vars(small):
        small.model = model
    return small
