"""NNX and Equinox modules as functions of their arrays. Each library is loaded for its modules only."""

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any

import jax

from jaxpruner.activations import models
from jaxpruner.tree import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class ModelArrays:
    """The arrays of a module, and the module as a function of them.

    Attributes:
      params: its parameters.
      state: arrays that belong to channels and are no parameters; `None` if there are none.
      inputs: of the module, without its state.
      make: `(params, state) -> module`, a new one with these arrays; `state` may be left out if there is none.
      run: `(module, state, *inputs) -> results`, in evaluation mode. It may change the module's mode.
    """

    params: PyTree
    state: PyTree | None
    inputs: tuple[Any, ...]
    make: Callable[..., Any]
    run: Callable[..., Any]

    @property
    def trees(self) -> tuple[PyTree, ...]:
        """The parameters, and the state if there is one."""
        return (self.params,) if self.state is None else (self.params, self.state)

    def apply(self, params: PyTree, *arguments: Any) -> Any:
        """The module as a function `(params, *inputs)`, or `(params, state, *inputs)` if there is a state."""
        state, inputs = (None, arguments) if self.state is None else (arguments[0], arguments[1:])
        return self.run(self.make(params, state), state, *inputs)


def arrays_of(
    model: Any, inputs: tuple[Any, ...], call: Callable[..., Any] | None = None
) -> ModelArrays | None:
    """The arrays of an NNX or Equinox module; `None` for anything else.

    Functions that Equinox wraps (`equinox.filter_jit`) are of its class, but hold no arrays, and count as functions.

    Args:
      model: any object.
      inputs: of the model.
      call: `(model, *inputs) -> results`. Without it the module itself is called.
    """
    call = call or (lambda module, *inputs: module(*inputs))
    framework = models.known_framework(model)
    if framework == 'nnx':
        return _nnx_arrays(model, inputs, call)
    return _equinox_arrays(model, inputs, call) if framework == 'equinox' else None


def _nnx_arrays(module: Any, inputs: tuple[Any, ...], call: Callable[..., Any]) -> ModelArrays:
    """The arrays of a module. The keys of its random numbers stay in it."""
    from flax import nnx

    graphdef, params, keys, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    has_state = bool(jax.tree.leaves(state))

    def make(params: PyTree, state: PyTree = None) -> Any:
        parts = (params, keys, state) if has_state else (params, keys)
        # The module may take the variables as they are, so that others would see what it changes.
        return nnx.merge(graphdef, *jax.tree.map(lambda array: array, parts))

    def run(module: Any, state: PyTree, *inputs: Any) -> Any:
        del state  # the module holds it
        module.eval()
        return call(module, *inputs)

    return ModelArrays(params, state if has_state else None, inputs, make, run)


def _equinox_arrays(
    module: Any, inputs: tuple[Any, ...], call: Callable[..., Any]
) -> ModelArrays | None:
    """The arrays of a module, and the `equinox.nn.State` among its inputs; `None` if the module has no arrays."""
    import equinox as eqx

    params, rest = eqx.partition(module, eqx.is_array)
    if not jax.tree.leaves(params):
        return None
    positions = [i for i, value in enumerate(inputs) if isinstance(value, eqx.nn.State)]
    state = inputs[positions[0]] if positions else None

    def make(params: PyTree, state: PyTree = None) -> Any:
        del state  # an input
        return eqx.combine(params, rest)

    def run(module: Any, state: PyTree, *inputs: Any) -> Any:
        if positions:
            inputs = (*inputs[: positions[0]], state, *inputs[positions[0] :])
        try:
            return call(eqx.nn.inference_mode(module), *inputs)
        except Exception as error:
            error.add_note(
                'A module of Equinox takes one example. jaxpruner.shrink maps it over a batch with '
                'call=lambda module, x: jax.vmap(module)(x).'
            )
            raise

    others = tuple([value for i, value in enumerate(inputs) if i not in positions[:1]])
    return ModelArrays(params, state, others, make, run)


def is_function(model: Any) -> bool:
    """Whether an object can be called with parameters; a model of linen or Haiku has a function instead."""
    return callable(model) and models.known_framework(model) not in ('linen', 'haiku')


def refusal(expected: str, given: Any) -> TypeError:
    """The error for an object that is no model."""
    text = ' '.join(reprlib.repr(given).split())
    return TypeError(
        f'{expected}, got {text}; with linen apply_fn is lambda variables, x: module.apply(variables, '
        'x), with Haiku model.apply'
    )
