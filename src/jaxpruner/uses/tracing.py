"""`param_uses`: traces a model once and finds the uses of each parameter."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.uses import views
from jaxpruner.uses.bodies import Program
from jaxpruner.uses.graph import Site, UnsupportedPrimitive, Use, UseGraph
from jaxpruner.uses.records import DATA, Findings, Value, WalkPosition
from jaxpruner.uses.walk import Walk


def param_uses(
    apply_fn: Callable[..., Any], params: tree_lib.PyTree, *inputs: Any, strict: bool = False
) -> UseGraph:
    """Finds how a model of any framework uses each of its parameters.

    The model is traced, not computed. So shapes (`jax.ShapeDtypeStruct`) are enough for parameters and inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace.
      params: any pytree of arrays, or of their shapes.
      *inputs: the other arguments, pytrees of arrays or of their shapes.
      strict: raise an error if a leaf cannot be followed.

    Returns:
      The uses of each leaf by its path. Leaves that cannot be followed are in `opaque`, and leaves that the results do
      not depend on are in `unused`.

    Raises:
      ValueError: there are no inputs, so data cannot be told from parameters.
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
    shapes = list(map(leaf_shape, leaves, paths))
    if not jax.tree.leaves(inputs):
        raise ValueError(
            'param_uses needs the inputs of the model, as arrays or shapes: param_uses(apply_fn, params, x); an array '
            'that apply_fn holds itself counts as a constant, so that no parameter would meet data'
        )
    program = jax.make_jaxpr(apply_fn)(params, *inputs)
    graph = _graph(paths, _walk_through(program, shapes), program)
    if strict and graph.opaque:
        reasons = []
        for path, reason in graph.opaque.items():
            reasons.append(f'{tree_lib.path_string(path)}: {reason}')
        raise UnsupportedPrimitive(
            f'{"; ".join(reasons)}; with strict=False these leaves are in graph.opaque'
        )
    return graph


def _walk_through(program: Any, shapes: Sequence[tuple[int, ...]]) -> Findings:
    """Walks through a program of parameters with these shapes and of inputs."""
    arguments = []
    for leaf, shape in enumerate(shapes):
        view = views.whole(leaf, shape)
        arguments.append(Value(views=(view,)))
    number_of_inputs = len(program.jaxpr.invars) - len(shapes)
    arguments += [DATA] * number_of_inputs
    position = WalkPosition(needed=(True,) * len(program.jaxpr.outvars))
    walk = Walk(shapes)
    results = walk.visit_program(Program.of(program), arguments, position)
    for number, result in enumerate(results):
        for view in result.views:
            site = Site(position.path, None, number, view)
            walk.findings.add_use('output', site, position)
    return walk.findings


def _graph(paths: Sequence[tree_lib.Path], findings: Findings, program: Any) -> UseGraph:
    opaque = {}
    for leaf, reason in sorted(findings.opaque.items()):
        opaque[paths[leaf]] = reason
    by_leaf: dict[int, list[Use]] = {}
    for use in findings.uses.values():
        by_leaf.setdefault(use.site.view.leaf, []).append(use)
    uses = {}
    unused = []
    for leaf, path in enumerate(paths):
        if path in opaque:
            continue
        if leaf in by_leaf:
            uses[path] = tuple(sorted(by_leaf[leaf], key=_order_in_program))
        else:
            unused.append(path)
    flops = sum(findings.flops.values())
    return UseGraph(uses, opaque, tuple(unused), flops, program, findings.uncounted)


def _order_in_program(use: Use) -> tuple[tuple[int, ...], int]:
    return use.site.path, use.site.operand


def leaf_shape(leaf: Any, path: tree_lib.Path) -> tuple[int, ...]:
    """The shape of a parameter. Raises TypeError if it is no array."""
    if hasattr(leaf, 'shape') and hasattr(leaf, 'dtype'):
        return tuple(leaf.shape)
    if isinstance(leaf, int | float | complex):
        return ()
    raise TypeError(
        f'{tree_lib.path_string(path)} is no array but {leaf!r}; give the arrays alone and put the rest into apply_fn '
        '(equinox.partition(model, equinox.is_array), flax.nnx.split(model))'
    )
