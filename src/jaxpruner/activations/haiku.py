"""Haiku: a pair of `init` and `apply` of which the second is tapped, and the interceptor that tells of its layers."""

import contextlib
from collections.abc import Callable
from typing import Any

import haiku as hk

from jaxpruner.activations import calls
from jaxpruner.activations import layers as layers_lib


def tapped(model: Any, tap: calls.Tap) -> Any:
    """The transformed function with a tap on its layers.

    Args:
      model: an `hk.Transformed` or `hk.TransformedWithState`.
      tap: the tap.

    Returns:
      A pair of the same type; `init` stays as it is.

    >>> tap = calls.Tap(('linear',), lambda name, call, args, kwargs: 0 * call(*args, **kwargs) + 1)
    >>> model = tapped(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x))), tap)
    >>> import jax
    >>> x = jax.numpy.ones((1, 3))
    >>> model.apply(model.init(jax.random.key(0), x), x)
    Array([[1., 1.]], dtype=float32)
    """
    return model._replace(apply=calls.tapped(model.apply, tap, 'haiku'))


def intercepting() -> contextlib.AbstractContextManager[Any]:
    """A context in which Haiku's layers run with the active taps.

    >>> with intercepting():
    ...     pass
    """
    return hk.intercept_methods(_intercept)


def _intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
    if context.method_name == '__init__':
        return call(*args, **kwargs)
    path = tuple(context.module.module_name.split('/'))
    return calls.run_layer(
        layers_lib.Layer(path, context.module, context.method_name), call, args, kwargs
    )
