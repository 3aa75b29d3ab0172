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
from jaxpruner.activations import traces

# What stands in for a call of a layer: called with the layer's name, the call, and its arguments.
Action = Callable[[str, Callable[..., Any], Any, Any], Any]

_INTERCEPTORS = {
    'flax.linen': 'jaxpruner.activations.linen',
    'haiku': 'jaxpruner.activations.haiku',
}


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """An action on chosen layers.

    Attributes:
      entries: the layers, as `layers.read_where` returns them.
      action: what to do when one is called; hashable.
      token: taps of equal tokens do the same, so that what was compiled under one holds under the other.
      refuses: a call in which an entry chose no layer ends in an error.
      innermost: the action stands next to the layer, inside those of all other taps.
      called: the names of the layers that were called so far.
      compiled: the entries, by number, that chose a layer inside jit, scan, …; a later call need not run it in Python.

    >>> Tap(('Dense_*',), lambda name, call, args, kwargs: call(*args, **kwargs)).refuses
    True
    """

    entries: tuple[Any, ...]
    action: Action
    token: Hashable = dataclasses.field(default_factory=object)
    refuses: bool = True
    innermost: bool = False
    called: dict[str, None] = dataclasses.field(default_factory=dict)
    compiled: set[int] = dataclasses.field(default_factory=set)


class _Call:
    """One call of a tapped function, and what was seen in it."""

    def __init__(self, tap: Tap):
        self.tap = tap
        self._trace = traces.trace_state()
        self._called: dict[str, None] = {}
        self._methods: dict[str, None] = {}
        self._matched: set[int] = set()

    def chooses(self, layer: layers_lib.Layer) -> bool:
        """Whether a layer that is called is one of the chosen; takes down that it was called."""
        found = {i for i, entry in enumerate(self.tap.entries) if layers_lib.chosen(entry, layer)}
        if layer.path and layer.method != 'setup':
            called = self._called if found or layer.method == '__call__' else self._methods
            called[layer.name] = self.tap.called[layer.name] = None
        self._matched |= found
        if self._trace != traces.trace_state():
            self.tap.compiled.update(found)
        return bool(found)

    def check(self, kind: str) -> None:
        """Refuses entries that chose nothing."""
        known = self._matched | self.tap.compiled
        missing = [entry for i, entry in enumerate(self.tap.entries) if i not in known]
        if self.tap.refuses and missing:
            layers_lib.refuse_call(missing, self._called or self._methods, kind)


class _Thread(threading.local):
    """What is going on in this thread: calls of tapped functions, outermost first, and the layers that are run."""

    calls: tuple[_Call, ...] = ()
    running: tuple[tuple[int, str], ...] = ()


_thread = _Thread()


def tapped(function: Callable[..., Any], tap: Tap, kind: str = 'function') -> Callable[..., Any]:
    """The function, with a tap on the layers of flax.linen and Haiku that it calls.

    Args:
      function: any function.
      tap: the tap.
      kind: the kind of model that it runs, for messages.

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
        this = _Call(tap)
        with _active(this):
            outputs = function(*args, **kwargs)
        this.check(kind)
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
    from_within = sorted(_thread.calls, key=lambda each: each.tap.innermost)[::-1]
    for each in from_within:
        if each.chooses(layer):
            call = acted(call, layer.name, each.tap.action)
    _thread.running = (*before, this)
    try:
        return call(*args, **kwargs)
    finally:
        _thread.running = before


def acted(call: Callable[..., Any], name: str, action: Action) -> Callable[..., Any]:
    """A call of a layer with an action in its place.

    Args:
      call: runs the layer.
      name: the layer's name.
      action: what to do.

    >>> acted(max, 'max', lambda name, call, args, kwargs: -call(*args, **kwargs))(1, 2)
    -2
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return action(name, call, args, kwargs)

    return run


@contextlib.contextmanager
def _active(call: _Call) -> Iterator[None]:
    outer = _thread.calls
    calls = (*outer, call)
    with contextlib.ExitStack() as stack:
        if not outer:
            for library, ours in _INTERCEPTORS.items():
                if sys.modules.get(library) is not None:
                    stack.enter_context(importlib.import_module(ours).intercepting())
        stack.enter_context(traces.compiled_under(tuple(each.tap.token for each in calls)))
        _thread.calls = calls
        try:
            yield
        finally:
            _thread.calls = outer
