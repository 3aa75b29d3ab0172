"""flax.nnx: a copy of a model in which the chosen layers are of a subclass; state and paths stay as they are."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxpruner.activations import calls, substitutes
from jaxpruner.activations import layers as layers_lib


def tapped(model: Any, tap: calls.Tap) -> Any:
    """A copy of the model, of the same paths and state, with a tap on its layers; ValueError if the tap names none.

    A layer that the model holds more than once is known by its first path, as in `nnx.state`.
    """
    paths = layers_lib.choose_paths(tap.entries, [layer for _, layer in _layers(model)])
    copy = nnx.clone(model)
    for path, layer in _layers(copy):
        if layer.path not in paths:
            continue
        if layer.is_function:
            function = substitutes.tapped_function(
                layer.value, layer.name, tap.action, tap.innermost
            )
            _put(copy, path, function)
        else:
            settings = _class_settings(layer.value)
            new_class = substitutes.tapped_class(
                type(layer.value), layer.name, tap.action, tap.innermost, settings
            )
            object.__setattr__(layer.value, '__class__', new_class)
    return copy


def _layers(model: Any) -> list[tuple[Sequence[Any], layers_lib.Layer]]:
    """Modules that can be called, and functions, with their paths as nnx has them."""
    layers = []
    for path, value in nnx.iter_graph(model):
        if callable(value) and not isinstance(value, type | nnx.Variable | jax.Array):
            names = tuple(map(str, path))
            is_function = not isinstance(value, nnx.Module)
            layers.append((path, layers_lib.Layer(names, value, is_function=is_function)))
    return layers


def _class_settings(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Newer modules are pytrees unless their class says otherwise, which a subclass has to repeat."""
    if 'pytree' not in inspect.signature(nnx.Module.__init_subclass__).parameters:
        return ()
    return (('pytree', not jax.tree_util.all_leaves([layer])),)


def _put(holder: Any, path: Any, value: Any) -> Any:
    """Puts a value at a path; plain containers, which a copy of the model may share with it, are made anew."""
    key = path[0]
    rest = path[1:]
    by_item = isinstance(holder, dict) or not isinstance(key, str)
    child = holder[key] if by_item else getattr(holder, key)
    new = _put(child, rest, value) if rest else value
    if new is child:
        return holder
    if isinstance(holder, dict):
        return {**holder, key: new}
    if hasattr(holder, '_fields'):
        return holder._replace(**{key: new})
    if isinstance(holder, list | tuple):
        return type(holder)(new if i == key else item for i, item in enumerate(holder))
    if by_item:
        holder[key] = new
    else:
        setattr(holder, key, new)
    return holder
