"""Batches that are looked at before they are read: some iterables can be read once, some are no batches at all."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jax

from jaxpruner import caller_warnings

READ_AGAIN = 'give a list, or another iterable that begins anew each time'


def as_batches(batches: Any) -> Iterable[Any]:
    """An iterable of batches; one array, or one mapping of arrays, is a single batch.

    Args:
      batches: what a caller gave.

    Raises:
      TypeError: it cannot be read at all.

    >>> as_batches([1, 2])
    [1, 2]
    """
    if hasattr(batches, 'shape') or isinstance(batches, Mapping):
        what = 'a mapping' if isinstance(batches, Mapping) else f'an array of shape {tuple(batches.shape)}'
        caller_warnings.warn(f'batches is {what}, which is taken as one batch; give a list of batches: batches=[x]')
        return [batches]
    if not isinstance(batches, Iterable):
        raise TypeError(f'batches is an iterable of batches, such as batches=[x]; got {batches!r}')
    return batches


def first_batch(batches: Iterable[Any], times: int = 1) -> tuple[Any, Iterable[Any]]:
    """Looks at the first batch.

    Args:
      batches: an iterable of batches.
      times: how often they will be read.

    Returns:
      The first batch, and an iterable of all, the first included.

    Raises:
      TypeError: what is given is no iterable.
      ValueError: there is none, or they cannot be read that often.

    >>> first_batch(iter([1, 2]))[0]
    1
    """
    batches = as_batches(batches)
    iterator = iter(batches)
    if iterator is batches and times > 1:
        raise ValueError(f'batches are read {times} times, and an iterator can be read once; {READ_AGAIN}')
    for first in iterator:
        once = times == 1 and not isinstance(batches, Sized)  # it may be that they can be read no more often
        return first, itertools.chain([first], iterator) if once else batches
    raise ValueError('batches are empty; give at least one')


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """The inputs in a batch: a tuple holds them, anything else is the only one.

    >>> as_inputs(3)
    (3,)
    """
    return batch if isinstance(batch, tuple) else (batch,)


def check_inputs(function: Callable[..., Any], batch: Any, name: str = 'apply_fn') -> None:
    """Refuses a batch that does not hold as many inputs as the model takes.

    Args:
      function: `(params, *inputs) -> results`.
      batch: the first.
      name: what the function is called, for the message.

    Raises:
      TypeError: a tuple was meant, or the tuple has another length.

    >>> check_inputs(lambda params, x, y: x + y, (1, 2))
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions that are not written in Python
        return
    inputs = as_inputs(batch)
    try:
        signature.bind(None, *inputs)
        return
    except TypeError:
        pass
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = sum(parameter.kind in positional for parameter in signature.parameters.values()) - 1
    given = f'a {type(batch).__name__} of {len(batch)}' if isinstance(batch, list | tuple) else 'a single array'
    raise TypeError(
        f'{name} takes params and {taken} input{"" if taken == 1 else "s"}, and the first batch is {given}; a batch of '
        'several inputs is a tuple: batches=[(x, y), …]'
    )


def shapes_of(inputs: Any) -> Any:
    """Shapes and dtypes of inputs, to be compared.

    >>> import numpy as np
    >>> shapes_of((np.ones(3, np.float32),))
    (((3,), dtype('float32')),)
    """
    return jax.tree.map(lambda array: (jax.numpy.shape(array), jax.numpy.result_type(array)), inputs)
