"""Batches that are looked at before they are read: some iterables can be read once, some are no batches at all."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jax
import jax.numpy as jnp


def first_batch(batches: Any, times: int = 1) -> tuple[Any, Any]:
    """Takes the first batch; returns it, and an iterable of all batches, the first included.

    Raises:
      TypeError: what is given is no iterable of batches; an array or a mapping is a single one.
      ValueError: there are no batches, or they cannot be read `times` times.
    """
    is_one = isinstance(batches, Mapping) or hasattr(batches, 'shape')
    if is_one or not isinstance(batches, Iterable):
        given = f'one {type(batches).__name__}' if is_one else repr(batches)
        raise TypeError(f'batches is an iterable of batches, such as batches=[x]; got {given}')
    iterator = iter(batches)
    if iterator is batches and times > 1:
        raise ValueError(
            f'batches are read {times} times, and an iterator can be read once; give a list, or another iterable that '
            'begins anew each time'
        )
    for first in iterator:
        # What has no length can perhaps be read only once.
        is_read_once = times == 1 and not isinstance(batches, Sized)
        return first, itertools.chain([first], iterator) if is_read_once else batches
    raise ValueError('batches are empty; give at least one')


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """Takes the inputs out of a batch: a plain tuple holds them, anything else, a NamedTuple, too, is the only one."""
    return batch if type(batch) is tuple else (batch,)


def check_inputs(function: Callable[..., Any], batch: Any, name: str = 'apply_fn') -> None:
    """Refuses a batch that holds other inputs than `function(params, *inputs)` takes."""
    try:
        inspect.signature(function).bind(None, *as_inputs(batch))
    except ValueError:  # of functions that are not written in Python
        return
    except TypeError as error:
        given = jax.tree.map(jnp.shape, batch)
        raise TypeError(
            f'{name} does not take the first batch, of shapes {given}: {error}. A batch of several inputs is a plain '
            f'tuple, batches=[(x, y), …]; of a mapping take them out, lambda params, batch: {name}(params, '
            f"batch['x']); settings are bound by functools.partial({name}, train=…)"
        ) from None


def shapes_of(inputs: Any) -> Any:
    """Lists shapes and dtypes of inputs, to be compared."""
    return jax.tree.map(lambda array: (jnp.shape(array), jnp.result_type(array)), inputs)
