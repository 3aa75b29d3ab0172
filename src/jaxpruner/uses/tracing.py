"""`param_uses`: traces a model once and says what each parameter is for."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.uses import bodies, records, views, walk
from jaxpruner.uses.graph import UnsupportedPrimitive, Use, UseGraph


def param_uses(
    apply_fn: Callable[..., Any], params: tree_lib.PyTree, *inputs: Any, strict: bool = False
) -> UseGraph:
    """How a model uses each of its parameters, in whatever framework it is written.

    The model is traced, not computed: shapes (`jax.ShapeDtypeStruct`) do for parameters and inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace.
      params: any pytree of arrays, or of their shapes.
      *inputs: what else it is called with, pytrees of arrays or of their shapes.
      strict: raise where nothing can be said of a leaf.

    Returns:
      For each path of a leaf its uses; what cannot be followed is in `opaque`, what has no part in the results in
      `unused`.

    Raises:
      ValueError: there are no inputs, so that data cannot be told from parameters.
      TypeError: a leaf of `params` is no array.
      UnsupportedPrimitive: `strict`, and a leaf is opaque.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((3, 4)), 'bias': jnp.ones(4)}
    >>> print(param_uses(lambda p, x: x @ p['kernel'] + p['bias'], params, jnp.ones((2, 3))))
    leaf    operation    contract  free  batch  stack  exact  FLOPs  trips
    bias    elementwise  -         0     -      -      yes    8      1
    kernel  dot          0         1     -      -      yes    48     1
    56 FLOPs in all
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    shapes = [_shape(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    if not jax.tree.leaves(inputs):
        raise ValueError(
            'param_uses needs the inputs of the model, as arrays or shapes: param_uses(apply_fn, params, x); an array '
            'that apply_fn holds itself counts as a constant, so that no parameter would meet data'
        )
    program = jax.make_jaxpr(apply_fn)(params, *inputs)
    wanted = (True,) * len(program.jaxpr.outvars)
    arguments = [records.Value(views=(views.whole(i, shape),)) for i, shape in enumerate(shapes)]
    arguments += [records.DATA] * (len(program.jaxpr.invars) - len(arguments))
    walker = walk.Walk(shapes)
    results = walker.program(
        bodies.Program(program.jaxpr, tuple(program.consts)), arguments, records.Scope(), wanted
    )
    for number, result in enumerate(results):
        for view in result.views:
            walker.record('output', None, number, view, records.Scope())
    return _graph(paths, walker.records, program, strict)


def _graph(
    paths: list[tree_lib.Path], found: records.Records, program: Any, strict: bool
) -> UseGraph:
    by_leaf: dict[int, list[Use]] = {}
    for leaf, use in found.uses.values():
        by_leaf.setdefault(leaf, []).append(use)
    opaque = {paths[leaf]: reason for leaf, reason in sorted(found.opaque.items())}
    if strict and opaque:
        named = '; '.join(
            f'{tree_lib.path_string(path)}: {reason}' for path, reason in opaque.items()
        )
        raise UnsupportedPrimitive(f'{named}; with strict=False these leaves are in graph.opaque')
    uses = {
        path: tuple(sorted(by_leaf[leaf], key=lambda use: (use.site.path, use.site.operand)))
        for leaf, path in enumerate(paths)
        if leaf in by_leaf and path not in opaque
    }
    unused = tuple(path for path in paths if path not in uses and path not in opaque)
    return UseGraph(uses, opaque, unused, sum(found.flops.values()), program, found.uncounted)


def _shape(leaf: Any, path: tree_lib.Path) -> tuple[int, ...]:
    if hasattr(leaf, 'shape') and hasattr(leaf, 'dtype'):
        return tuple(leaf.shape)
    if isinstance(leaf, int | float | complex):
        return ()
    raise TypeError(
        f'{tree_lib.path_string(path)} is no array but {leaf!r}; give the arrays alone and put the rest into apply_fn '
        '(equinox.partition(model, equinox.is_array), flax.nnx.split(model))'
    )
