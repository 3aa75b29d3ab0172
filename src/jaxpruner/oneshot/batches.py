"""Batches that are looked at before they are read: some iterables can be read once, some are no batches at all."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings

_TUPLE = 'a batch of several inputs is a tuple: batches=[(x, y), …]'
READ_AGAIN = 'give a list, or another iterable that begins anew each time'


def as_batches(batches: Any) -> Iterable[Any]:
    """Refuses what is no iterable of batches; takes an array, or a mapping of arrays, as a single batch."""
    is_mapping = isinstance(batches, Mapping)
    if is_mapping or hasattr(batches, 'shape'):
        given = 'a mapping' if is_mapping else f'an array of shape {tuple(batches.shape)}'
        caller_warnings.warn(
            f'batches is {given}, which is taken as one batch; give a list of batches: batches=[x]'
        )
        return [batches]
    if not isinstance(batches, Iterable):
        raise TypeError(f'batches is an iterable of batches, such as batches=[x]; got {batches!r}')
    return batches


def first_batch(batches: Iterable[Any], times: int = 1) -> tuple[Any, Iterable[Any]]:
    """Takes the first batch; returns it, and an iterable of all batches, the first included.

    Raises:
      TypeError: what is given is no iterable.
      ValueError: there are no batches, or they cannot be read `times` times.
    """
    batches = as_batches(batches)
    iterator = iter(batches)
    if iterator is batches and times > 1:
        raise ValueError(
            f'batches are read {times} times, and an iterator can be read once; {READ_AGAIN}'
        )
    for first in iterator:
        # What has no length can perhaps be read only once.
        is_read_once = times == 1 and not isinstance(batches, Sized)
        return first, itertools.chain([first], iterator) if is_read_once else batches
    raise ValueError('batches are empty; give at least one')


def check_model_is_given(
    algorithm: str, call: str, apply_fn: Any, batches: Any, instead: str = ''
) -> None:
    """Refuses a call that lacks the model or the data of an algorithm that looks at the inputs of each layer."""
    given = {'apply_fn': apply_fn, 'batches': batches}
    missing = [f'{name}=…' for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f'{algorithm} looks at the inputs of each layer, and {call} lacks {" and ".join(missing)}: give the model '
            f'and data, {call}(…, apply_fn=…, batches=…){instead}'
        )


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """Takes the inputs out of a batch: a plain tuple holds them, anything else, a NamedTuple, too, is the only one."""
    return batch if type(batch) is tuple else (batch,)


def check_samples(batch: Any, number: int) -> None:
    """Refuses batch `number` if every array in it is empty: nothing can be learned from it."""
    shapes = []
    for leaf in jax.tree.leaves(batch):
        shape = getattr(leaf, 'shape', ())
        if shape:  # neither a number nor what is no array
            shapes.append(shape)
    if shapes and all(0 in shape for shape in shapes):
        texts = ', '.join(map(str, shapes))
        raise ValueError(
            f'batches[{number}] holds no samples: its inputs have shapes {texts}; leave it out'
        )


def check_inputs(
    function: Callable[..., Any], batch: Any, name: str = 'apply_fn', params: Any = None
) -> None:
    """Refuses a batch that holds another number of inputs than `function(params, *inputs)` takes.

    With `params` a batch that is a list is tried: the function may take a list as one input.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions that are not written in Python
        return
    inputs = as_inputs(batch)
    try:
        signature.bind(None, *inputs)
    except TypeError:
        raise TypeError(_mismatch(signature, batch, name)) from None
    if params is not None and isinstance(batch, list) and len(batch) > 1:
        _check_list(function, batch, name, params)


def shapes_of(inputs: Any) -> Any:
    """Lists shapes and dtypes of inputs, to be compared."""

    def shape_of(array: Any) -> tuple[Any, Any]:
        return jnp.shape(array), jnp.result_type(array)

    return jax.tree.map(shape_of, inputs)


def _mismatch(signature: inspect.Signature, batch: Any, name: str) -> str:
    """Says what is wrong with a batch that a function of this signature does not take."""
    positional = 0
    keywords = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional += 1
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            keywords.append(parameter.name)
    if keywords:
        settings = ', '.join(f'{keyword}=…' for keyword in keywords)
        return f'{name} needs {settings}; bind them: functools.partial({name}, {settings})'
    inputs = '1 input' if positional == 2 else f'{positional - 1} inputs'
    given = f'a {type(batch).__name__}'
    remedy = _TUPLE
    parts: list[str] = []
    if hasattr(batch, 'shape'):
        given = f'a single array of shape {tuple(batch.shape)}'
    elif isinstance(batch, Mapping):
        parts = [f'batch[{key!r}]' for key in batch]
    elif hasattr(batch, '_fields'):
        parts = [f'batch.{field}' for field in batch._fields]
    elif isinstance(batch, list | tuple):
        given += f' of {len(batch)}'
    if parts:
        given += f', which is one input ({", ".join(parts)})'
        some = ', '.join(parts[: positional - 1])
        remedy = f'take the inputs out of it: {name}=lambda params, batch: {name}(params, {some})'
    return f'{name} takes params and {inputs}, and the first batch is {given}; {remedy}'


def _check_list(function: Callable[..., Any], batch: Any, name: str, params: Any) -> None:
    """Refuses a list of several inputs which the function does not take as its one input."""
    try:
        jax.eval_shape(function, params, batch)
    except (TypeError, AttributeError, ValueError) as error:
        raise TypeError(
            f'{name} fails on the first batch, a list of {len(batch)}, as its one input ({error}); {_TUPLE}'
        ) from error
