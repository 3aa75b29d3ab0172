"""Layers of a model run with actions on what they are given or return, whatever library they are of.

flax.linen and Haiku tell interceptors which layers a function calls. NNX and Equinox do not: there the chosen layers
of a copy of the model are of a subclass. No library is imported: who gives a model of one has imported it.
"""

import contextlib
import contextvars
import dataclasses
import fnmatch
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import xla_metadata

from jaxpruner import tree as tree_lib


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model."""

    path: tree_lib.Path  # names from the model down to the layer; empty for the model itself
    value: Any  # the module, or the function that is one of a module's fields
    is_function: bool = False  # the value is a function, not a module

    @property
    def name(self) -> str:
        """The name in reports and messages; the model itself goes by the name of its class."""
        return tree_lib.path_string(self.path) or type(self.value).__name__


@dataclasses.dataclass(frozen=True)
class Action:
    """What happens to float arrays of a layer when it is called; hashable."""

    side: str  # 'inputs': the first array of at least one dimension; 'outputs': every array
    function: Callable[[str, Any], Any]  # of the layer's name and the array
    is_required: bool  # a layer without such an array, or an entry that means no layer, is an error


# Pairs of a layer's name and an action, in the order in which they act.
Actions = tuple[tuple[str, Action], ...]
_numbers = itertools.count()


@dataclasses.dataclass(eq=False)
class Tap:
    """An action on chosen layers."""

    entries: tuple[Any, ...]  # which layers, as `read_where` returns them
    action: Action
    # What was compiled inside a function under one tap holds under another of the same token.
    token: str = dataclasses.field(default_factory=lambda: str(next(_numbers)))
    called: dict[str, None] = dataclasses.field(default_factory=dict)  # names of layers so far
    matched: set[int] = dataclasses.field(default_factory=set)  # entries that meant one of them


# Which layers an entry means.


def read_where(where: Any) -> tuple[Any, ...]:
    """Reads a setting that names layers: entries that are names or globs, classes, functions, or predicates."""
    entries = tuple(where) if isinstance(where, list | tuple | set | frozenset) else (where,)
    if not entries:
        raise ValueError("where names no layer; '*' means every one")
    for entry in entries:
        if not isinstance(entry, str) and not callable(entry):
            raise TypeError(
                "where must be a name or glob such as 'Dense_*', a class, a function (name, layer) -> bool, or a list "
                f'of those, got {entry!r}'
            )
    return entries


def means_layer(entry: Any, layer: Layer) -> bool:
    """Whether an entry of `where` means a layer.

    Only its class means the model itself. A function in a field is meant by itself, or by a name whose last part is
    written out: modules hold initialisers and the like, which no glob means.

    >>> layer = Layer(('encoder', 'Dense_0'), None)
    >>> means_layer('*/Dense_0', layer), means_layer('encoder-*', layer), means_layer('Dense_0', layer)
    (True, True, False)
    """
    if isinstance(entry, str):
        is_open = layer.is_function and set('*?[') & set(entry.replace('-', '/').split('/')[-1])
        paths = [separator.join(layer.path) for separator in '/-' if layer.path and not is_open]
        return entry in paths or any(fnmatch.fnmatchcase(path, entry) for path in paths)
    if layer.is_function:
        return inspect.unwrap(layer.value, stop=lambda function: function is entry) is entry
    if isinstance(entry, type):
        return isinstance(layer.value, entry)
    return bool(layer.path) and bool(entry(layer.name, layer.value))


def refuse(entry: Any, names: Iterable[str]) -> None:
    """Raises the `ValueError` for an entry that means none of the layers of these names."""
    hint = (
        'there is none: only layers of flax.linen and Haiku are seen inside a function, and a glob or a predicate '
        'never means the model itself: name its class'
    )
    if names := list(names):
        hint = tree_lib.nearest(entry if isinstance(entry, str) else '', names)
    raise ValueError(f'where: {entry!r} matches no layer; {hint}')


# A layer's call.


def run(actions: Actions, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a layer with actions on the arrays that it is given and returns."""
    for name, action in actions:
        if action.side == 'inputs':
            given = {**dict(enumerate(args)), **kwargs}
            first = next((key for key, value in given.items() if is_float_array(value, 1)), None)
            if first is not None:
                given[first] = action.function(name, given[first])
            elif action.is_required:
                raise ValueError(
                    f"layer {name!r} was called without a float array; prune its outputs: prune='outputs'"
                )
            args = [given.pop(i) for i in range(len(args))]
            kwargs = given
    outputs = call(*args, **kwargs)
    for name, action in actions:
        if action.side == 'outputs':
            leaves, treedef = jax.tree.flatten(
                outputs, is_leaf=lambda node: tree_lib.is_instance(node, 'equinox.nn', 'State')
            )
            if action.is_required and not any(is_float_array(leaf, 1) for leaf in leaves):
                raise ValueError(
                    f'layer {name!r} returned no float array of at least one dimension, so there is nothing to prune '
                    '(a function may be mapped over single activations, as in equinox.nn.MLP); choose other layers, '
                    "or the layers after it with prune='inputs'"
                )
            outputs = treedef.unflatten(
                action.function(name, leaf) if is_float_array(leaf) else leaf for leaf in leaves
            )
    return outputs


def is_float_array(value: Any, dimensions: int = 0) -> bool:
    """Whether a value is an array of floats or complex numbers, of at least so many dimensions."""
    is_array = isinstance(value, jax.Array | np.ndarray) and value.ndim >= dimensions
    return is_array and jnp.issubdtype(value.dtype, jnp.inexact)


# Functions that call layers of flax.linen and Haiku.

_TAPS = contextvars.ContextVar[tuple[Tap, ...]]('taps', default=())
_RUNNING = contextvars.ContextVar[tuple[Any, ...]]('running', default=())
# The path of a layer, by library; a linen module that is not bound has none.
_PATHS: dict[str, Callable[[Any], tree_lib.Path | None]] = {
    'flax.linen': lambda module: None if module.scope is None else tuple(module.path),
    'haiku': lambda module: tuple(module.module_name.split('/')),
}


def tapped_function(function: Callable[..., Any], tap: Tap) -> Callable[..., Any]:
    """Puts a tap on the layers that a function calls; a jitted one is a `TypeError`.

    The libraries would run the interceptor that was entered last first; taps act from the innermost function outwards.
    So there is one interceptor, which asks all taps that are active in the thread.
    """
    if isinstance(function, jax.stages.Wrapped):
        raise TypeError(
            f'{function!r} is already jitted, and what is compiled cannot be changed; give the function itself and put '
            'jax.jit around the result'
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        taps = (*_TAPS.get(), tap)
        with contextlib.ExitStack() as stack:
            for library, path_of in _PATHS.items() if len(taps) == 1 else ():
                if (module := sys.modules.get(library)) is not None:
                    interceptor = functools.partial(_intercept, path_of)
                    stack.enter_context(module.intercept_methods(interceptor))
            # JAX keeps what it traces and compiles apart by such metadata, which change nothing else.
            tokens = ','.join(active.token for active in taps)
            stack.enter_context(xla_metadata.set_xla_metadata(jaxpruner_taps=tokens))
            stack.callback(_TAPS.reset, _TAPS.set(taps))
            outputs = function(*args, **kwargs)
        for i, entry in enumerate(tap.entries):
            if tap.action.is_required and i not in tap.matched:
                refuse(entry, tap.called)
        return outputs

    return call


def _intercept(path_of: Any, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Calls a layer with the actions of the taps that mean it, the innermost first."""
    path = path_of(context.module) if context.method_name == '__call__' else None
    # Through `super()` a layer calls its base class: one layer, one call.
    if path is None or id(context.module) in _RUNNING.get():
        return call(*args, **kwargs)
    layer = Layer(path, context.module)
    actions = []
    for tap in reversed(_TAPS.get()):
        if layer.path:
            tap.called[layer.name] = None
        meaning = [i for i, entry in enumerate(tap.entries) if means_layer(entry, layer)]
        tap.matched.update(meaning)
        if meaning:
            actions.append((layer.name, tap.action))
    reset = _RUNNING.set((*_RUNNING.get(), id(context.module)))
    try:
        return run(tuple(actions), call, args, kwargs)
    finally:
        _RUNNING.reset(reset)


@dataclasses.dataclass(frozen=True, eq=False)
class TappedModule:
    """A linen module with a tap on its layers; other attributes, such as `init`, are the module's own."""

    module: Any
    tap: Tap

    def __getattr__(self, name: str) -> Any:
        # Copying asks for fields before there are any.
        if name.startswith('__') or name in ('module', 'tap'):
            raise AttributeError(name)
        if name == 'bind':
            raise AttributeError(
                'a bound module would run without the taps; use apply(variables, …), with method=… for another method'
            )
        value = getattr(self.module, name)
        if name in ('apply', 'init_with_output'):
            return tapped_function(value, self.tap)
        if name in ('clone', 'copy'):
            return lambda **settings: TappedModule(value(**settings), self.tap)
        return value


# Models of NNX and Equinox.

_PARTS = '_jaxpruner_parts'  # the attribute of a subclass that holds the layer's own class and the actions


def tapped_model(model: Any, tap: Tap) -> Any:
    """Copies a model, and puts the action on chosen layers; arrays are shared, paths and state stay as they are.

    A layer that an NNX model holds more than once is known by its first path, as in `nnx.state`.
    """
    takes_pytree = False
    if tree_lib.is_instance(model, 'flax.nnx', 'Module'):
        nnx = sys.modules['flax.nnx']
        module_class = getattr(nnx, 'Pytree', nnx.Object)
        data, copied = (type, nnx.Variable), nnx.clone(model)
        takes_pytree = 'pytree' in inspect.signature(nnx.Module.__init_subclass__).parameters
    else:  # the copy holds each layer once
        module_class, data = sys.modules['equinox'].Module, (type,)
        copied = jax.tree.map(lambda leaf: leaf, model)

    def rebuilt(node: Any, path: tree_lib.Path, replace: Any, made: dict[int, Any]) -> Any:
        """Makes modules and containers anew, with `replace(layer)` for each layer, after what it holds."""

        def inside(name: Any, value: Any) -> Any:
            return rebuilt(value, (*path, str(name)), replace, made)

        if isinstance(node, module_class):
            if id(node) not in made:
                made[id(node)] = new = object.__new__(type(node))
                for name, value in sorted(vars(node).items()):
                    object.__setattr__(new, name, inside(name, value))
                if callable(new):
                    replace(Layer(path, new))
            return made[id(node)]
        if type(node) is dict:
            return {key: inside(key, value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            names = getattr(node, '_fields', range(len(node)))
            items = [inside(name, item) for name, item in zip(names, node, strict=True)]
            return type(node)(*items) if hasattr(node, '_fields') else type(node)(items)
        if callable(node) and not isinstance(node, data):
            return replace(Layer(path, node, is_function=True))
        return node

    layers: list[Layer] = []

    def collect(layer: Layer) -> Any:
        layers.append(layer)
        return layer.value

    rebuilt(copied, (), collect, {})
    chosen: set[tree_lib.Path] = set()
    for i, entry in enumerate(tap.entries):
        meant = [each for each in layers if each.is_function and means_layer(entry, each)]
        if isinstance(entry, str) or not meant:  # a function of the model is no predicate
            meant = [each for each in layers if means_layer(entry, each)]
        tap.matched.add(i)
        if not meant:
            refuse(entry, [each.name for each in layers if each.path and not each.is_function])
        chosen.update(each.path for each in meant)

    def substitute(layer: Layer) -> Any:
        value, new = layer.value, ((layer.name, tap.action),)
        if layer.path not in chosen:
            return value
        if layer.is_function:
            if isinstance(value, _TappedFunction):
                return _TappedFunction(value.__wrapped__, value.actions + new)
            return _TappedFunction(value, new)
        own, actions = vars(type(value)).get(_PARTS, (type(value), ()))
        # Newer NNX modules are pytrees unless their class says otherwise, which a subclass has to repeat.
        is_pytree = not jax.tree_util.all_leaves([value])
        settings = (('pytree', is_pytree),) if takes_pytree else ()
        object.__setattr__(value, '__class__', _subclass(own, actions + new, settings))
        return value

    return rebuilt(copied, (), substitute, {})


@dataclasses.dataclass(frozen=True)
class _TappedFunction:
    """A function with actions on its calls."""

    __wrapped__: Callable[..., Any]
    actions: Actions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it with the actions."""
        return run(self.actions, self.__wrapped__, args, kwargs)


@functools.lru_cache(1024)  # models that are tapped alike are of one structure, and compile once
def _subclass(base: Any, actions: Actions, settings: tuple[tuple[str, Any], ...]) -> type:
    @functools.wraps(base.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(actions, functools.partial(base.__call__, self), args, kwargs)

    namespace = {'__call__': call, '__module__': __name__, _PARTS: (base, actions)}
    return types.new_class(
        f'Tapped{base.__name__}', (base,), dict(settings), lambda body: body.update(namespace)
    )
