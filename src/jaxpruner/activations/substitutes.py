"""What takes a layer's place in an nnx or Equinox model: an object of a subclass, or a callable for a function.

Subclasses are made once for each action, so that models that are tapped alike are of one structure and compile once.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

from jaxpruner.activations import calls


@dataclasses.dataclass(frozen=True)
class TappedFunction:
    """A function with an action on its calls.

    Attributes:
      function: the function.
      name: the layer's name.
      action: what to do when it is called.

    >>> TappedFunction(abs, 'act', lambda name, call, args, kwargs: 2 * call(*args, **kwargs))(-3)
    6
    """

    function: Callable[..., Any]
    name: str
    action: calls.Action

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it with the action."""
        return self.action(self.name, self.function, args, kwargs)


@functools.cache
def tapped_class(base: type, name: str, action: calls.Action, settings: tuple[tuple[str, Any], ...] = ()) -> type:
    """A subclass whose `__call__` is run by an action.

    Args:
      base: the layer's class.
      name: the layer's name.
      action: what to do when it is called.
      settings: named arguments of the class statement.

    Returns:
      The class, the same one for the same arguments.

    >>> class Layer:
    ...     def __call__(self, x):
    ...         return x
    >>> tapped_class(Layer, 'act', lambda name, call, args, kwargs: 2 * call(*args, **kwargs))()(3)
    6
    """
    original: Any = base.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return action(name, functools.partial(original, self), args, kwargs)

    namespace = {'__call__': call, '__module__': base.__module__, '__doc__': base.__doc__}
    return types.new_class(f'Tapped{base.__name__}', (base,), dict(settings), lambda body: body.update(namespace))
