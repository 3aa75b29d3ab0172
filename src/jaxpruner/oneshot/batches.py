"""Batches that are looked at before they are read: some iterables can be read once, some are no batches at all."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jax

from jaxpruner.core import caller_warnings

_TUPLE = 'a batch of several inputs is a tuple: batches=[(x, y), …]'
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
        what = (
            'a mapping'
            if isinstance(batches, Mapping)
            else f'an array of shape {tuple(batches.shape)}'
        )
        caller_warnings.warn(
            f'batches is {what}, which is taken as one batch; give a list of batches: batches=[x]'
        )
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
        raise ValueError(
            f'batches are read {times} times, and an iterator can be read once; {READ_AGAIN}'
        )
    for first in iterator:
        once = times == 1 and not isinstance(
            batches, Sized
        )  # it may be that they can be read no more often
        return first, itertools.chain([first], iterator) if once else batches
    raise ValueError('batches are empty; give at least one')


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """The inputs in a batch: a tuple holds them, anything else is the only one.

    >>> as_inputs(3)
    (3,)
    """
    return batch if isinstance(batch, tuple) else (batch,)


def check_inputs(
    function: Callable[..., Any], batch: Any, name: str = 'apply_fn', params: Any = None
) -> None:
    """Refuses a batch that does not hold as many inputs as the model takes.

    Args:
      function: `(params, *inputs) -> results`.
      batch: the first.
      name: what the function is called, for the message.
      params: given these, a batch that is a list is tried: the function may take a list as one input.

    Raises:
      TypeError: a tuple was meant, the tuple has another length, or a keyword is needed.

    >>> check_inputs(lambda params, x, y: x + y, (1, 2))
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions that are not written in Python
        return
    inputs = as_inputs(batch)
    try:
        signature.bind(None, *inputs)
    except TypeError:
        pass
    else:
        _check_list(function, batch, name, params)
        return
    parameters = signature.parameters.values()
    keywords = [
        each.name
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    if keywords:
        settings = ', '.join(f'{keyword}=…' for keyword in keywords)
        raise TypeError(
            f'{name} needs {settings}; bind them: functools.partial({name}, {settings})'
        )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = sum(parameter.kind in positional for parameter in parameters) - 1
    given = (
        f'a {type(batch).__name__} of {len(batch)}'
        if isinstance(batch, list | tuple)
        else 'a single array'
    )
    raise TypeError(
        f'{name} takes params and {taken} input{"" if taken == 1 else "s"}, and the first batch is {given}; {_TUPLE}'
    )


def _check_list(function: Callable[..., Any], batch: Any, name: str, params: Any) -> None:
    """Refuses a list of several inputs which the function does not take as its one input."""
    if params is None or not isinstance(batch, list) or len(batch) < 2:
        return
    try:
        jax.eval_shape(function, params, batch)
    except (TypeError, AttributeError, ValueError) as error:
        raise TypeError(
            f'{name} fails on the first batch, a list of {len(batch)}, as its one input ({error}); {_TUPLE}'
        ) from error


def shapes_of(inputs: Any) -> Any:
    """Shapes and dtypes of inputs, to be compared.

    >>> import numpy as np
    >>> shapes_of((np.ones(3, np.float32),))
    (((3,), dtype('float32')),)
    """
    return jax.tree.map(
        lambda array: (jax.numpy.shape(array), jax.numpy.result_type(array)), inputs
    )
