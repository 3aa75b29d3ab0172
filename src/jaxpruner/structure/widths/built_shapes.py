"""Builds a module without values, and compares its shapes with those that it should have."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.tree import PyTree

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# `(**arguments)` -> apply function, parameters.
Build = Callable[..., tuple[Callable[..., Any], PyTree]]


class Mismatch(NamedTuple):
    """An axis whose length differs from its target."""

    leaf: str
    axis: int
    length: int
    target: int


class ModuleInShapes(NamedTuple):
    """The apply function of a module, and the shapes of its parameters."""

    apply_fn: Callable[..., Any]
    params: PyTree


def build_in_shapes(build: Build, arguments: Mapping[str, Any]) -> ModuleInShapes:
    """Builds a module as shapes, without values."""
    functions = []

    def params() -> PyTree:
        apply_fn, params = build(**arguments)
        functions.append(apply_fn)
        return params

    shapes = jax.eval_shape(params)
    return ModuleInShapes(functions[-1], shapes)


def shapes_of(build: Build, arguments: Mapping[str, Any]) -> Shapes:
    """The shape of each parameter of a module, by its path."""
    module = build_in_shapes(build, arguments)
    paths, leaves, _ = tree_lib.flatten_with_paths(module.params)
    shapes = {}
    for path, leaf in zip(paths, leaves, strict=True):
        shapes[tree_lib.path_string(path)] = tuple(leaf.shape)
    return shapes


def mismatches(shapes: Shapes, target: Shapes) -> Iterator[Mismatch]:
    """Yields the axes whose length differs from the target, of leaves that have the rank of the target."""
    for name, shape in shapes.items():
        expected = target.get(name, ())
        if len(shape) != len(expected):
            continue
        for axis, length in enumerate(shape):
            if length != expected[axis]:
                yield Mismatch(name, axis, length, expected[axis])


def differences(shapes: Shapes, target: Shapes) -> Iterator[str]:
    """Yields a line for each difference of a module's shapes from the target."""
    for name, expected in target.items():
        if name not in shapes:
            yield f'{name} is missing'
        elif len(shapes[name]) != len(expected):
            yield f'{name} has shape {shapes[name]} in place of {expected}'
    for name in shapes:
        if name not in target:
            yield f'{name} is a further leaf'
    for mismatch in mismatches(shapes, target):
        yield f'{mismatch.leaf}[{mismatch.axis}] has {mismatch.length} in place of {mismatch.target}'
