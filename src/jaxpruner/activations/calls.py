"""Taps on functions: what happens to the layers of flax.linen and Haiku that a function calls.

While a tapped function runs, each framework has one interceptor, which asks the taps that are active in this thread.
Taps act from the innermost function outwards, so one interceptor must order them: a framework itself runs the
interceptor that was entered last first.
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
    """An action on chosen layers."""

    entries: tuple[Any, ...]  # the layers, as `layers.read_where` returns them
    action: Action  # what to do when one of them is called; hashable
    # Taps of equal tokens do the same, so that what was compiled under one holds under the other.
    token: Hashable = dataclasses.field(default_factory=object)
    refuses: bool = True  # a call in which an entry chose no layer ends in an error
    innermost: bool = False  # the action stands next to the layer, inside those of all other taps
    called: dict[str, None] = dataclasses.field(default_factory=dict)  # layers called so far
    # Numbers of entries that chose a layer inside jit, scan, …: a later call need not run it in Python.
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
        """Whether the tap means a layer that is called; remembers that it was called."""
        matched = set()
        for number, entry in enumerate(self.tap.entries):
            if layers_lib.means_layer(entry, layer):
                matched.add(number)
        if layer.path and layer.method != 'setup':
            called = self._called if matched or layer.method == '__call__' else self._methods
            called[layer.name] = self.tap.called[layer.name] = None
        self._matched |= matched
        if self._trace != traces.trace_state():
            self.tap.compiled.update(matched)
        return bool(matched)

    def check(self, framework: str) -> None:
        """Refuses entries that chose nothing."""
        matched = self._matched | self.tap.compiled
        missing = [entry for number, entry in enumerate(self.tap.entries) if number not in matched]
        if self.tap.refuses and missing:
            layers_lib.refuse_call(missing, self._called or self._methods, framework)


class _Thread(threading.local):
    """What is going on in this thread."""

    calls: tuple[_Call, ...] = ()  # of tapped functions, outermost first
    running: tuple[tuple[int, str], ...] = ()  # layers: their id and method


_thread = _Thread()


def tapped(
    function: Callable[..., Any], tap: Tap, framework: str = 'function'
) -> Callable[..., Any]:
    """The function with a tap on the layers of flax.linen and Haiku that it calls; a jitted one is a TypeError."""
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
        this.check(framework)
        return outputs

    return call


def run_layer(layer: layers_lib.Layer, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a layer that a framework calls, with the actions of the taps that choose it."""
    this = (id(layer.value), layer.method)
    before = _thread.running
    # Through `super()` a layer's method calls its base class's: one layer, one call.
    if this in before:
        return call(*args, **kwargs)
    inner_first = sorted(_thread.calls, key=lambda active: active.tap.innermost)[::-1]
    for active in inner_first:
        if active.chooses(layer):
            call = acted(call, layer.name, active.tap.action)
    _thread.running = (*before, this)
    try:
        return call(*args, **kwargs)
    finally:
        _thread.running = before


def acted(call: Callable[..., Any], name: str, action: Action) -> Callable[..., Any]:
    """A call of a layer with an action in its place."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return action(name, call, args, kwargs)

    return run


@contextlib.contextmanager
def _active(call: _Call) -> Iterator[None]:
    outer = _thread.calls
    calls = (*outer, call)
    with contextlib.ExitStack() as stack:
        if not outer:
            for library, module_name in _INTERCEPTORS.items():
                if sys.modules.get(library) is not None:
                    interceptor = importlib.import_module(module_name)
                    stack.enter_context(interceptor.intercepting())
        tokens = tuple(active.tap.token for active in calls)
        stack.enter_context(traces.compiled_under(tokens))
        _thread.calls = calls
        try:
            yield
        finally:
            _thread.calls = outer
