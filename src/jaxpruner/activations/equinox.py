"""Equinox: a model in which the chosen layers are of a subclass; arrays are shared, paths stay as they are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from jaxpruner import tree as tree_lib
from jaxpruner.activations import calls, substitutes
from jaxpruner.activations import layers as layers_lib


def tapped(model: Any, tap: calls.Tap) -> Any:
    """A model of the same paths and arrays with a tap on its layers; ValueError if the tap names none of them."""
    layers: list[layers_lib.Layer] = []

    def collect(layer: layers_lib.Layer) -> Any:
        layers.append(layer)
        return layer.value

    _mapped(model, (), collect)
    paths = layers_lib.choose_paths(tap.entries, layers)
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
        child_path = (*path, *name)
        if isinstance(child, eqx.Module):
            child = _mapped(child, child_path, replace)
        elif _is_function(child):
            child = replace(layers_lib.Layer(child_path, child, is_function=True))
        new.append(child)
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
    """An action that does not see `eqx.nn.State` among the outputs, whose arrays are no activations."""

    action: calls.Action

    def __call__(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def boxed(*args: Any, **kwargs: Any) -> Any:
            return _map_instances(_Box, call(*args, **kwargs), eqx.nn.State)

        outputs = self.action(name, boxed, args, kwargs)
        return _map_instances(lambda box: box.state, outputs, _Box)


@dataclasses.dataclass(frozen=True)
class _Box:
    state: Any


def _map_instances(function: Callable[[Any], Any], outputs: Any, node_type: type) -> Any:
    def is_instance(node: Any) -> bool:
        return isinstance(node, node_type)

    return jax.tree.map(
        lambda node: function(node) if is_instance(node) else node, outputs, is_leaf=is_instance
    )
