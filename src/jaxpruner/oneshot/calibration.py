"""Runs a model on some batches and takes the statistics of what its weight matrices meet."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import moments
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.weight_matrices import WeightMatrices, contracted_axes, find_matrices
from jaxpruner.uses import UseGraph, param_uses, run_with_taps

logger = logging.getLogger(__name__)

KINDS = ('second_moment', 'gram')


class CalibratedMatrices(NamedTuple):
    """Weight matrices of a leaf, and the statistics of their inputs.

    >>> CalibratedMatrices(None, InputStatistics(2, jnp.ones(3))).statistics.count
    2
    """

    matrices: WeightMatrices
    statistics: InputStatistics


class Calibration(Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]]):
    """Statistics by leaf path; a leaf has one entry for each way in which it is read, mostly one.

    >>> found = calibrate(lambda params, x: x @ params['w'], {'w': jnp.ones((2, 3))}, [jnp.eye(2)])
    >>> [entry.statistics.second_moment.tolist() for entry in found['w']]
    [[1.0, 1.0]]
    """

    def __init__(self, by_leaf: Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]]):
        self._by_leaf = dict(by_leaf)

    def __getitem__(self, path: tree_lib.Path | str) -> tuple[CalibratedMatrices, ...]:
        for known, entries in self._by_leaf.items():
            if path in (known, tree_lib.path_string(known)):
                return entries
        name = path if isinstance(path, str) else tree_lib.path_string(path)
        known = map(tree_lib.path_string, self._by_leaf)
        raise KeyError(f'no statistics of {name!r}; {tree_lib.nearest(name, known)}')

    def __iter__(self) -> Iterator[tree_lib.Path]:
        return iter(self._by_leaf)

    def __len__(self) -> int:
        return len(self._by_leaf)


def calibrate(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    batches: Iterable[Any],
    kind: str = 'second_moment',
    only: Sequence[str | tree_lib.Path] | str | None = None,
) -> Calibration:
    """Statistics of the inputs of each leaf that is contracted with data, in whatever framework the model is written.

    Sums are float32, at highest precision. Leaves that meet the same value share their statistics. Layers that a scan
    goes through have statistics stacked in front. How much memory the statistics take is logged before they are made.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: any pytree of arrays.
      batches: any iterable of batches: a tuple holds the inputs, anything else is the only input. Each new shape is
        compiled anew.
      kind: `'second_moment'` (sums of squares), or `'gram'` (also of the products of each two inputs).
      only: names, globs or paths of leaves; by default all that are contracted with data.

    Returns:
      Statistics by leaf path.

    Raises:
      ValueError: another kind, a name that matches no leaf, no batches, or a leaf of which weights cannot be told.
      UnsupportedPrimitive: a leaf named by `only` goes through an operation that is not understood.

    >>> params = {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}
    >>> batches = [jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])]
    >>> (entry,) = calibrate(lambda p, x: x @ p['w'] + p['b'], params, batches, kind='gram')['w']
    >>> int(entry.statistics.count), entry.statistics.gram.tolist()
    (2, [[10.0, 2.0], [2.0, 4.0]])
    """
    if kind not in KINDS:
        raise ValueError(f'kind is {" or ".join(map(repr, KINDS))}, got {kind!r}')
    totals, plan, step, shape = None, _Plan({}, []), None, None
    for batch in batches:
        inputs = as_inputs(batch)
        new_shape = jax.tree.map(lambda array: (jnp.shape(array), jnp.result_type(array)), inputs)
        if step is None or new_shape != shape:
            graph = param_uses(apply_fn, params, *inputs)
            plan, shape = _plan(graph, only), new_shape
            step = jax.jit(_step(graph, plan, kind == 'gram'), donate_argnums=0)
        if totals is None:
            totals = _zeros(step, plan, params, inputs)
        totals = step(totals, params, *inputs)
    if totals is None:
        raise ValueError('batches are empty; calibration needs at least one')
    return Calibration(
        {
            path: tuple(CalibratedMatrices(one, totals[number]) for one, number in entries)
            for path, entries in plan.leaves.items()
        }
    )


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """The inputs in a batch: a tuple holds them, anything else is the only one.

    >>> as_inputs(3)
    (3,)
    """
    return batch if isinstance(batch, tuple) else (batch,)


class _Plan(NamedTuple):
    """Which values are observed: for each leaf its matrices and the number of their value; for each value its uses."""

    leaves: dict[tree_lib.Path, list[tuple[WeightMatrices, int]]]
    values: list[list[Any]]


def _plan(graph: UseGraph, only: Sequence[str | tree_lib.Path] | str | None) -> _Plan:
    names = (only,) if isinstance(only, str) else only
    if names is not None:
        tree_lib.check_names(names, [*graph, *graph.opaque, *graph.unused], 'only')
        chosen = [path for path in (*graph, *graph.opaque) if any(tree_lib.matches(name, path) for name in names)]
    else:
        chosen = list(graph)
    leaves: dict[tree_lib.Path, list[tuple[WeightMatrices, int]]] = {}
    values: dict[Any, list[Any]] = {}
    for path in chosen:
        for matrices in find_matrices(graph, path):
            # Leaves of which all uses meet the same values share a place.
            key = tuple(_value_key(use) for use in matrices.uses)
            values.setdefault(key, list(matrices.uses))
            leaves.setdefault(path, []).append((matrices, list(values).index(key)))
    return _Plan(leaves, list(values.values()))


def _value_key(use: Any) -> Any:
    """What the statistics of a use depend on."""
    site = use.site
    equation = site.equation
    data = equation.invars[1 - site.operand]
    stack = tuple(entry.loop for entry in site.view.stack)
    if equation.primitive.name == 'dot_general':
        return site.path[:-1], id(data), contracted_axes(equation, site.operand)[2:], stack
    same = {name: value for name, value in equation.params.items() if name != 'precision'}
    kernel = [equation.invars[1].aval.shape[axis] for axis in equation.params['dimension_numbers'].rhs_spec[1:]]
    return site.path[:-1], id(data), str(same), tuple(kernel), stack


def _step(graph: UseGraph, plan: _Plan, with_gram: bool) -> Callable[..., list[InputStatistics]]:
    uses = [use for value in plan.values for use in value]

    def statistic(use: Any, operands: list[jax.Array]) -> InputStatistics:
        operand = use.site.operand
        return moments.statistics_of(use.site.equation, operand, operands[1 - operand], with_gram)

    def step(totals: list[InputStatistics] | None, params: Any, *inputs: Any) -> list[InputStatistics]:
        _, found = run_with_taps(graph, uses, statistic, params, *inputs)
        rest = iter(found)
        sums = []
        for value in plan.values:
            first, *others = [next(rest) for _ in value]
            for other in others:
                first = jax.tree.map(jnp.add, first, other)
            sums.append(first)
        return sums if totals is None else jax.tree.map(jnp.add, totals, sums)

    return step


def _zeros(step: Callable[..., Any], plan: _Plan, params: Any, inputs: tuple[Any, ...]) -> list[InputStatistics]:
    shapes = jax.eval_shape(step, None, params, *inputs)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    logger.info(
        'calibration: statistics of %d leaves in %d places take %.1f MiB; only=… makes them fewer',
        len(plan.leaves),
        len(plan.values),
        size / 2**20,
    )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
