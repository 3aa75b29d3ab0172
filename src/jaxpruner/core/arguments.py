"""What a function is called with: settings that must be callable, and the arguments that it takes by name."""

import inspect
from collections.abc import Callable
from typing import Any


def check_callable(name: str, value: Any) -> None:
    """Refuses a setting that is neither a function nor `None`.

    Args:
      name: the setting's, for the message.
      value: what it was given.

    Raises:
      TypeError: it cannot be called.

    >>> check_callable('topk_fn', None)
    """
    if value is not None and not callable(value):
        raise TypeError(f'{name} must be a function, got {value!r}')


def given_state(state: Any, other: Any) -> Any:
    """The state that a method was given under one of its two names, `opt_state` and `sparse_state`.

    Args:
      state: what came under the one.
      other: what came under the other.

    Raises:
      TypeError: none or both were given.

    >>> given_state(None, 'state')
    'state'
    """
    if (state is None) == (other is None):
        raise TypeError('give the optimizer state once, as opt_state or as sparse_state')
    return other if state is None else state


def known_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes by name.

    Args:
      function: any function.
      arguments: by name.

    >>> known_arguments(lambda a, b: None, {'b': 1, 'c': 2})
    {'b': 1}
    """
    if not arguments:
        return {}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL
    }
    return {name: value for name, value in arguments.items() if name in names}


def check_taken(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Refuses arguments that a function does not take by name: they would have no effect.

    Args:
      function: any function.
      arguments: by name.
      name: what the function is called, for the message.

    Raises:
      TypeError: it does not take one of them.

    >>> check_taken(lambda a, b: None, {'b': 1}, 'add')
    """
    unused = sorted(set(arguments) - set(known_arguments(function, arguments)))
    if unused:
        raise TypeError(
            f'{name} does not take {", ".join(unused)}, which would have no effect; leave it out. To prune with a '
            'model and data, call jaxpruner.prune(params, sparsity, algorithm, apply_fn=…, batches=…)'
        )
