"""NNX and Equinox modules as functions of their arrays. Each library has a file, loaded for its modules only."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

from jaxpruner import text_tables
from jaxpruner.activations import models
from jaxpruner.tree import PyTree

_FILES = {
    'nnx': 'jaxpruner.structure.nnx_modules',
    'equinox': 'jaxpruner.structure.equinox_modules',
}
# Of models that are no functions, the functions that they have.
_FUNCTIONS = {'linen': 'lambda variables, x: module.apply(variables, x)', 'haiku': 'model.apply'}
_LONGEST = 60  # of an object in a message


@dataclasses.dataclass(frozen=True, eq=False)
class ModelArrays:
    """The arrays of a model, and the model as a function of them.

    Attributes:
      params: its parameters.
      state: arrays that belong to channels and are no parameters; `None` if there are none.
      inputs: of the model, without its state.
      make: `(params, state) -> model`, a new one with these arrays.
      run: `(model, state, *inputs) -> results`, in evaluation mode. It may change the model's mode.
    """

    params: PyTree
    state: PyTree | None
    inputs: tuple[Any, ...]
    make: Callable[[PyTree, PyTree], Any]
    run: Callable[..., Any]

    def apply(self, params: PyTree, *arguments: Any) -> Any:
        """The model as a function `(params, *inputs)`, or `(params, state, *inputs)` if there is a state."""
        state, inputs = self.split(arguments)
        return self.run(self.make(params, state), state, *inputs)

    def arguments(self, inputs: tuple[Any, ...], state: PyTree = None) -> tuple[Any, ...]:
        """The arguments after the parameters, with this state or the model's own."""
        if self.state is None:
            return inputs
        return (self.state if state is None else state, *inputs)

    def split(self, arguments: tuple[Any, ...]) -> tuple[PyTree, tuple[Any, ...]]:
        """Splits the arguments after the parameters into the state and the inputs."""
        return (None, arguments) if self.state is None else (arguments[0], arguments[1:])


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
    file = _FILES.get(models.known_framework(model) or '')
    return importlib.import_module(file).arrays_of(model, inputs, call) if file else None


def is_function(model: Any) -> bool:
    """Whether an object can be called with parameters; a model of linen or Haiku has a function instead."""
    return callable(model) and models.known_framework(model) not in _FUNCTIONS


def describe(model: Any) -> tuple[str, str]:
    """Describes an object that is not what is expected, and the function to give instead."""
    framework = models.known_framework(model) or ''
    function = _FUNCTIONS.get(framework, 'apply_fn')
    text = getattr(model, '__name__', None) or ' '.join(repr(model).split())
    if is_function(model):
        function = text
    return text_tables.shorten(text, _LONGEST), function


def shrunk_optimizer(optimizer: Any, shrink: Callable[[PyTree], PyTree], model: Any) -> Any:
    """An `nnx.Optimizer` whose arrays are shrunk; `None` for anything else."""
    if 'flax.nnx' not in sys.modules:
        return None
    return importlib.import_module(_FILES['nnx']).shrunk_optimizer(optimizer, shrink, model)
