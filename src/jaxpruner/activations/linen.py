"""flax.linen: a module whose `apply` is tapped, and the interceptor that tells of its layers."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import flax.linen as nn

from jaxpruner.activations import calls
from jaxpruner.activations import layers as layers_lib


@dataclasses.dataclass(frozen=True, eq=False)
class TappedModule:
    """A linen module with a tap on its layers; what is not defined here, such as `init`, is the module's own."""

    module: Any
    tap: calls.Tap

    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `init_with_output`."""
        return calls.tapped(self.module.init_with_output, self.tap, 'linen')(*args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `apply`."""
        return calls.tapped(self.module.apply, self.tap, 'linen')(*args, **kwargs)

    def clone(self, **settings: Any) -> Self:
        """The same with a clone of the module."""
        return dataclasses.replace(self, module=self.module.clone(**settings))

    def copy(self, **settings: Any) -> Self:
        """The same with a copy of the module."""
        return dataclasses.replace(self, module=self.module.copy(**settings))

    def __getattr__(self, name: str) -> Any:
        if name == 'bind':
            raise AttributeError(
                'a bound module would run without the taps; use apply(variables, …), with method=… for another method'
            )
        # Copying asks for fields before there are any.
        if name.startswith('__') or name in ('module', 'tap'):
            raise AttributeError(name)
        return getattr(self.module, name)


def tapped(model: Any, tap: calls.Tap) -> TappedModule:
    """The module with a tap on its layers."""
    return TappedModule(model, tap)


def intercepting() -> contextlib.AbstractContextManager[None]:
    """A context in which linen's layers run with the active taps."""
    return nn.intercept_methods(_intercept)


def _intercept(
    call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    module = context.module
    if module.scope is None:  # unbound, so it has no path
        return call(*args, **kwargs)
    return calls.run_layer(
        layers_lib.Layer(tuple(module.path), module, context.method_name), call, args, kwargs
    )
