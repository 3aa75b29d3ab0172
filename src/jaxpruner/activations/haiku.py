"""Haiku: a pair of `init` and `apply` of which the second is tapped, and the interceptor that tells of its layers."""

import contextlib
from collections.abc import Callable
from typing import Any

import haiku as hk

from jaxpruner.activations import calls
from jaxpruner.activations import layers as layers_lib


def tapped(model: Any, tap: calls.Tap) -> Any:
    """A pair of the same type whose `apply` is tapped; `init` stays as it is."""
    return model._replace(apply=calls.tapped(model.apply, tap, 'haiku'))


def intercepting() -> contextlib.AbstractContextManager[Any]:
    """A context in which Haiku's layers run with the active taps."""
    return hk.intercept_methods(_intercept)


def _intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
    if context.method_name == '__init__':
        return call(*args, **kwargs)
    path = tuple(context.module.module_name.split('/'))
    return calls.run_layer(
        layers_lib.Layer(path, context.module, context.method_name), call, args, kwargs
    )
