"""What takes a layer's place in an nnx or Equinox model: an object of a subclass, or a callable for a function.

Subclasses are made once for each action, so that models that are tapped alike are of one structure and compile once.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

from jaxpruner.activations import calls

# Names of the layer and actions on it, innermost first.
Actions = tuple[tuple[str, calls.Action], ...]
# The attribute of a subclass that holds the layer's own class and the actions.
_PARTS = '_jaxpruner_parts'


@dataclasses.dataclass(frozen=True)
class TappedFunction:
    """A function with actions on its calls."""

    function: Callable[..., Any]
    actions: Actions

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it with the actions."""
        return _run(self.function, self.actions, args, kwargs)


def tapped_function(
    function: Callable[..., Any], name: str, action: calls.Action, innermost: bool
) -> TappedFunction:
    """A function with an action on its calls; `innermost` puts it inside those that are there."""
    actions: Actions = ()
    if isinstance(function, TappedFunction):
        function, actions = function.function, function.actions
    return TappedFunction(function, _with(actions, (name, action), innermost))


def tapped_class(
    base: type,
    name: str,
    action: calls.Action,
    innermost: bool = False,
    settings: tuple[tuple[str, Any], ...] = (),
) -> type:
    """A subclass whose `__call__` is run by an action, the same class for the same arguments.

    `innermost` puts the action inside those that are there. `settings` are named arguments of the class statement.
    """
    own, actions = vars(base).get(_PARTS, (base, ()))
    return _subclass(own, _with(actions, (name, action), innermost), settings)


@functools.cache
def _subclass(base: type, actions: Actions, settings: tuple[tuple[str, Any], ...]) -> type:
    own: Any = base
    original = own.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(functools.partial(original, self), actions, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        make, *rest = own.__reduce_ex__(self, protocol)
        return (_Maker(make, base.__name__), *rest)

    namespace = {
        '__call__': call,
        '__reduce_ex__': reduce,
        '__module__': __name__,
        '__doc__': base.__doc__,
    }
    namespace[_PARTS] = (base, actions)
    return types.new_class(
        f'Tapped{base.__name__}', (base,), dict(settings), lambda body: body.update(namespace)
    )


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes a copy, but does not let itself be pickled: where the pickle is read, there is no such subclass."""

    make: Callable[..., Any]
    name: str

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f'the {self.name} of a sparsified model cannot be pickled; pickle the original model, and call '
            'sparsify_activations after loading it'
        )


def _with(actions: Actions, new: tuple[str, calls.Action], innermost: bool) -> Actions:
    return (new, *actions) if innermost else (*actions, new)


def _run(call: Callable[..., Any], actions: Actions, args: Any, kwargs: Any) -> Any:
    for name, action in actions:
        call = calls.acted(call, name, action)
    return call(*args, **kwargs)
