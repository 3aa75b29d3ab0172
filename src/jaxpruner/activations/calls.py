"""Taps on functions: what happens to the layers of flax.linen and Haiku that a function calls.

One interceptor stands in each framework for as long as a tapped function runs, and asks the taps that are active in
this thread. A framework runs interceptors that were entered later first; taps go from the innermost function out.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from jaxpruner.activations import layers as layers_lib

# What stands in for a call of a layer: called with the layer's name, the call, and its arguments.
Action = Callable[[str, Callable[..., Any], Any, Any], Any]

_INTERCEPTORS = {'flax.linen': 'jaxpruner.activations.linen', 'haiku': 'jaxpruner.activations.haiku'}


@dataclasses.dataclass(eq=False)
class Tap:
    """An action on chosen layers.

    Attributes:
      entries: the layers, as `layers.read_where` returns them.
      action: what to do when one is called; hashable.
      token: taps of equal tokens do the same, so that what was compiled under one holds under the other.
      refuses: a call in which no layer was chosen ends in an error.
      called: the names of the layers that were called.
      matched: a layer was chosen.

    >>> Tap(('Dense_*',), lambda name, call, args, kwargs: call(*args, **kwargs)).matched
    False
    """

    entries: tuple[Any, ...]
    action: Action
    token: Hashable = dataclasses.field(default_factory=object)
    refuses: bool = True
    called: dict[str, None] = dataclasses.field(default_factory=dict)
    matched: bool = False

    def chooses(self, layer: layers_lib.Layer) -> bool:
        """Whether a layer that is called is one of the chosen; takes down that it was called."""
        found = any(layers_lib.chosen(entry, layer) for entry in self.entries)
        if layer.path and (found or layer.method == '__call__'):
            self.called[layer.name] = None
        self.matched |= found
        return found


class _Thread(threading.local):
    """What is going on in this thread: taps, outermost first, and the calls that are being run."""

    taps: tuple[Tap, ...] = ()
    running: tuple[tuple[int, str], ...] = ()


_thread = _Thread()
# Functions jitted inside a tapped one are compiled apart from the same functions outside; single operations that run
# outside jit are compiled anew for it, too. Older JAX cannot tell the two apart.
_compiled_under = jax.make_user_context(()) if hasattr(jax, 'make_user_context') else contextlib.nullcontext


def tapped(function: Callable[..., Any], tap: Tap) -> Callable[..., Any]:
    """The function, with a tap on the layers of flax.linen and Haiku that it calls.

    Args:
      function: any function.
      tap: the tap.

    Returns:
      A function that does the same otherwise.

    Raises:
      TypeError: the function is jitted already.

    >>> tap = Tap(('*',), lambda name, call, args, kwargs: call(*args, **kwargs), refuses=False)
    >>> tapped(max, tap)(1, 2)
    2
    """
    if isinstance(function, jax.stages.Wrapped):
        raise TypeError(
            f'{function!r} is already jitted, and what is compiled cannot be changed; give the function itself and put '
            'jax.jit around the result'
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _active(tap):
            outputs = function(*args, **kwargs)
        if tap.refuses and not tap.matched:
            layers_lib.refuse_call(tap.entries, tap.called)
        return outputs

    return call


def run_layer(layer: layers_lib.Layer, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a layer that a framework calls, with the taps that choose it.

    Args:
      layer: the layer.
      call: runs it.
      args: its positional arguments.
      kwargs: its named arguments.

    >>> run_layer(layers_lib.Layer(('Dense_0',), None), max, (1, 2), {})
    2
    """
    this = (id(layer.value), layer.method)
    before = _thread.running
    # Through `super()` a layer's method calls its base class's: one layer, one call.
    if this in before:
        return call(*args, **kwargs)
    for tap in reversed(_thread.taps):
        if tap.chooses(layer):
            call = functools.partial(_acted, tap.action, layer.name, call)
    _thread.running = (*before, this)
    try:
        return call(*args, **kwargs)
    finally:
        _thread.running = before


def _acted(action: Action, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return action(name, call, args, kwargs)


@contextlib.contextmanager
def _active(tap: Tap) -> Iterator[None]:
    outer = _thread.taps
    taps = (*outer, tap)
    with contextlib.ExitStack() as stack:
        if not outer:
            for library, ours in _INTERCEPTORS.items():
                if sys.modules.get(library) is not None:
                    stack.enter_context(importlib.import_module(ours).intercepting())
        stack.enter_context(_compiled_under(tuple(each.token for each in taps)))
        _thread.taps = taps
        try:
            yield
        finally:
            _thread.taps = outer
