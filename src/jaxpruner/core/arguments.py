"""What a function is called with: settings that must be callable, and the arguments that it takes by name."""

import inspect
from collections.abc import Callable
from typing import Any


def check_callable(name: str, value: Any) -> None:
    """Refuses a setting (`name`) that is neither a function nor `None`."""
    if value is not None and not callable(value):
        raise TypeError(f'{name} must be a function, got {value!r}')


def given_state(state: Any, other: Any) -> Any:
    """Returns the state that a method was given under one of its two names; refuses none and both."""
    if (state is None) == (other is None):
        raise TypeError('give the optimizer state once, as opt_state or as sparse_state')
    return other if state is None else state


def known_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Picks those arguments that a function takes by name.

    >>> known_arguments(lambda a, b: None, {'b': 1, 'c': 2})
    {'b': 1}
    """
    if not arguments:
        return {}
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return arguments
        if parameter.kind is not parameter.VAR_POSITIONAL:
            names.add(parameter.name)
    return {name: value for name, value in arguments.items() if name in names}


def signature_words(function: Callable[..., Any]) -> str:
    """Shows what a function takes, as its definition says, or what it is where that is not known.

    >>> signature_words(lambda self, params, scores=None: None)
    '(self, params, scores=None)'
    """
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):  # no function, or one of C
        return repr(function)


def check_taken(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Refuses arguments that a function (`name` in the message) does not take: they would have no effect."""
    unused = sorted(set(arguments) - set(known_arguments(function, arguments)))
    if unused:
        raise TypeError(
            f'{name} does not take {", ".join(unused)}, which would have no effect; leave it out. To prune with a '
            'model and data, call jaxpruner.prune(params, sparsity, algorithm, apply_fn=…, batches=…)'
        )
