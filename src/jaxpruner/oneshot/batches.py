"""Batches that are looked at before they are read: some iterables can be read once, some are no batches at all."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings

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


def first_batch(batches: Any, times: int = 1) -> tuple[Any, Any]:
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


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """Takes the inputs out of a batch: a plain tuple holds them, anything else, a NamedTuple, too, is the only one."""
    return batch if type(batch) is tuple else (batch,)


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


def check_samples(batch: Any, number: int) -> None:
    """Refuses batch `number` if every array in it is empty: nothing can be learned from it."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if getattr(leaf, 'shape', ())]
    if shapes and all(0 in shape for shape in shapes):
        raise ValueError(
            f'batches[{number}] holds no samples: its inputs have shapes {", ".join(map(str, shapes))}; leave it out'
        )


def check_inputs(function: Callable[..., Any], batch: Any, name: str = 'apply_fn') -> None:
    """Refuses a batch that holds other inputs than `function(params, *inputs)` takes."""
    try:
        inspect.signature(function).bind(None, *as_inputs(batch))
    except ValueError:  # of functions that are not written in Python
        return
    except TypeError as error:
        size = f' of {len(batch)}' if isinstance(batch, list | tuple) else ''
        given, shape = f'a {type(batch).__name__}{size}', getattr(batch, 'shape', None)
        if shape is not None:
            given = f'an array of shape {tuple(shape)}'
        raise TypeError(
            f'{name} does not take the first batch, {given}: {error}. A batch of several inputs is a plain tuple, '
            f"batches=[(x, y), …]; of a mapping take them out, lambda params, batch: {name}(params, batch['x']); "
            f'settings are bound by functools.partial({name}, train=…)'
        ) from None


def shapes_of(inputs: Any) -> Any:
    """Lists shapes and dtypes of inputs, to be compared."""
    return jax.tree.map(lambda array: (jnp.shape(array), jnp.result_type(array)), inputs)
