"""NNX and Equinox modules as functions of their arrays. Each library is loaded for its modules only."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpruner.activations import models
from jaxpruner.tree import PyTree

Call = Callable[..., Any]
Inputs = tuple[Any, ...]


class ModelArrays(NamedTuple):
    """The arrays of a module, and the module as a function of them.

    Attributes:
      trees: its parameters; and the arrays that belong to channels and are no parameters, if there are any.
      inputs: of the module, without its state.
      make: `(*trees) -> module`, a new one with these arrays.
      run: `(module, *state, *inputs) -> results`, in evaluation mode. It may change the module's mode.
    """

    trees: tuple[PyTree, ...]
    inputs: Inputs
    make: Call
    run: Call

    def apply(self, params: PyTree, *arguments: Any) -> Any:
        """The module as a function `(params, *inputs)`, or `(params, state, *inputs)` if there is a state."""
        state = arguments[: len(self.trees) - 1]
        return self.run(self.make(params, *state), *arguments)


def arrays_of(model: Any, inputs: Inputs, call: Call | None = None) -> ModelArrays | None:
    """The arrays of an NNX or Equinox module; `None` for a function.

    Functions that Equinox wraps (`equinox.filter_jit`) are of its class, but hold no arrays, and count as functions.

    Args:
      model: any object.
      inputs: of the model.
      call: `(model, *inputs) -> results`. Without it the module itself is called.

    Raises:
      TypeError: it is neither.
    """
    call = call or (lambda module, *inputs: module(*inputs))
    framework = models.known_framework(model)
    if framework == 'nnx':
        return _nnx_arrays(model, inputs, call)
    arrays = _equinox_arrays(model, inputs, call) if framework == 'equinox' else None
    if arrays is None and (framework in ('linen', 'haiku') or not callable(model)):
        raise TypeError(
            f'got a {type(model).__name__}; give an NNX or Equinox module, or a function apply_fn, to shrink the pair '
            '(apply_fn, params): with linen lambda variables, x: module.apply(variables, x), with Haiku model.apply'
        )
    return arrays


def _nnx_arrays(module: Any, inputs: Inputs, call: Call) -> ModelArrays:
    """The arrays of a module. The keys of its random numbers stay in it."""
    from flax import nnx

    graphdef, params, keys, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    trees = (params, state) if jax.tree.leaves(state) else (params,)

    def make(*trees: PyTree) -> Any:
        # The module may take the variables as they are, so that others would see what it changes.
        return nnx.merge(graphdef, *jax.tree.map(lambda array: array, (*trees, keys)))

    def run(module: Any, *arguments: Any) -> Any:
        module.eval()
        return call(module, *arguments[len(trees) - 1 :])  # the module holds its state

    return ModelArrays(trees, inputs, make, run)


def _equinox_arrays(module: Any, inputs: Inputs, call: Call) -> ModelArrays | None:
    """The arrays of a module, and the `equinox.nn.State` among its inputs; `None` if the module has no arrays."""
    import equinox as eqx

    params, rest = eqx.partition(module, eqx.is_array)
    if not jax.tree.leaves(params):
        return None
    positions = [i for i, value in enumerate(inputs) if isinstance(value, eqx.nn.State)][:1]
    others = tuple([value for i, value in enumerate(inputs) if i not in positions])

    def make(params: PyTree, *state: PyTree) -> Any:
        del state  # an input
        return eqx.combine(params, rest)

    def run(module: Any, *arguments: Any) -> Any:
        in_order = list(arguments)
        for i in positions:
            in_order.insert(i, in_order.pop(0))
        try:
            return call(eqx.nn.inference_mode(module), *in_order)
        except Exception as error:
            error.add_note(
                'A module of Equinox takes one example. jaxpruner.shrink maps it over a batch with '
                'call=lambda module, x: jax.vmap(module)(x).'
            )
            raise

    return ModelArrays((params, *[inputs[i] for i in positions]), others, make, run)
