"""Equinox: a model in which the chosen layers are of a subclass; arrays are shared, paths stay as they are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from jaxpruner.activations import calls, substitutes
from jaxpruner.activations import layers as layers_lib
from jaxpruner.core import tree as tree_lib


def tapped(model: Any, tap: calls.Tap) -> Any:
    """A new model with a tap on its layers.

    Args:
      model: an Equinox module.
      tap: the tap.

    Returns:
      A model of the same paths and arrays.

    Raises:
      ValueError: the tap names no layer of the model.

    >>> tap = calls.Tap((eqx.nn.Linear,), lambda name, call, args, kwargs: 0 * call(*args, **kwargs) + 1)
    >>> tapped(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), tap)(jax.numpy.ones(3))
    Array([1., 1.], dtype=float32)
    """
    found: list[layers_lib.Layer] = []

    def take_down(layer: layers_lib.Layer) -> Any:
        found.append(layer)
        return layer.value

    _mapped(model, (), take_down)
    paths = layers_lib.choose(tap.entries, found)
    action = _SparingState(tap.action)

    def substitute(layer: layers_lib.Layer) -> Any:
        if layer.path not in paths:
            return layer.value
        if layer.is_function:
            return substitutes.tapped_function(layer.value, layer.name, action, tap.innermost)
        new_class = substitutes.tapped_class(type(layer.value), layer.name, action, tap.innermost)
        return _as_instance(layer.value, new_class)

    return _mapped(model, (), substitute)


def _mapped(module: Any, path: tree_lib.Path, replace: Callable[[layers_lib.Layer], Any]) -> Any:
    """Replaces layers and functions from the bottom up; `replace` sees a layer after what it holds."""

    def is_child(node: Any) -> bool:
        return node is not module and isinstance(node, eqx.Module)

    children, treedef = jax.tree.flatten(module, is_leaf=is_child)
    names = tree_lib.flatten_with_paths(jax.tree.unflatten(treedef, range(len(children))))[0]
    new = []
    for name, child in zip(names, children, strict=True):
        where = (*path, *name)
        if isinstance(child, eqx.Module):
            new.append(_mapped(child, where, replace))
        else:
            new.append(
                replace(layers_lib.Layer(where, child, is_function=True))
                if _is_function(child)
                else child
            )
    module = jax.tree.unflatten(treedef, new)
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if field.metadata.get('static', False) and _is_function(value):
            layer = layers_lib.Layer((*path, field.name), value, is_function=True)
            object.__setattr__(module, field.name, replace(layer))
    return replace(layers_lib.Layer(path, module)) if callable(module) else module


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | jax.Array)


def _as_instance(module: Any, new_class: type) -> Any:
    new = object.__new__(new_class)
    for name, value in vars(module).items():
        object.__setattr__(new, name, value)
    return new


@dataclasses.dataclass(frozen=True)
class _SparingState:
    """An action to which `eqx.nn.State` among the outputs is no pytree of activations."""

    action: calls.Action

    def __call__(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def boxed(*args: Any, **kwargs: Any) -> Any:
            return _map_states(_Box, call(*args, **kwargs), eqx.nn.State)

        return _map_states(lambda box: box.state, self.action(name, boxed, args, kwargs), _Box)


@dataclasses.dataclass(frozen=True)
class _Box:
    state: Any


def _map_states(function: Callable[[Any], Any], outputs: Any, kind: type) -> Any:
    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return jax.tree.map(
        lambda node: function(node) if is_kind(node) else node, outputs, is_leaf=is_kind
    )
