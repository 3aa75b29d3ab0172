"""Runs a model on some batches and takes the statistics of what its weight matrices meet."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.explicit_meshes import on_explicit_mesh
from jaxpruner.core.progress import progress_bar
from jaxpruner.oneshot.batches import as_batches, as_inputs, check_inputs, shapes_of
from jaxpruner.oneshot.followed_leaves import FollowedLeaves, check_used, warn_of_unclear
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.observed import Observed, Part, check_alike, find_observed, input_taps
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.uses import UseGraph, param_uses
from jaxpruner.uses.compiled_once import CompiledOnce
from jaxpruner.uses.taps import Taps

logger = logging.getLogger(__name__)

KINDS = ('second_moment', 'gram')


class CalibratedMatrices(NamedTuple):
    """Weight matrices of a leaf, and the statistics of their inputs.

    >>> CalibratedMatrices(None, InputStatistics(2, jax.numpy.ones(3))).statistics.count
    2
    """

    matrices: WeightMatrices
    statistics: InputStatistics


class Calibration(Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]]):
    """Statistics by leaf path; a leaf has one entry for each way in which it is read, mostly one.

    >>> import jax.numpy as jnp
    >>> found = calibrate(lambda params, x: x @ params['w'], {'w': jnp.ones((2, 3))}, [jnp.eye(2)])
    >>> [entry.statistics.second_moment.tolist() for entry in found['w']]
    [[1.0, 1.0]]
    """

    def __init__(
        self,
        by_leaf: Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]],
        followed: FollowedLeaves | None = None,
    ):
        self._by_leaf = dict(by_leaf)
        # Of all leaves that were asked for, so that it can be said why some have no statistics.
        self.followed = followed

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
    progress: bool = True,
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
      progress: show a progress bar, if stderr is a terminal and rich is installed.

    Returns:
      Statistics by leaf path.

    Raises:
      TypeError: a batch holds another number of inputs than the model takes.
      ValueError: another kind, a name that matches no leaf, no batches, a model that does not use its parameters, or a
        leaf that `only` names itself and of which weights cannot be told. Of other such leaves a warning says so.
      UnsupportedPrimitive: a leaf that `only` names itself goes through an operation that is not understood.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}
    >>> batches = [jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])]
    >>> (entry,) = calibrate(lambda p, x: x @ p['w'] + p['b'], params, batches, kind='gram')['w']
    >>> int(entry.statistics.count), entry.statistics.gram.tolist()
    (2, [[10.0, 2.0], [2.0, 4.0]])
    """
    if kind not in KINDS:
        raise ValueError(f'kind is {" or ".join(map(repr, KINDS))}, got {kind!r}')
    totals, observed, step, shape = None, Observed([], []), None, None
    batches = as_batches(batches)
    with progress_bar(len(batches) if isinstance(batches, Sized) else None, progress) as show:
        for number, batch in enumerate(batches):
            show('calibrating', number, totals)
            inputs = as_inputs(batch)
            new_shape = shapes_of(inputs)
            if step is None or new_shape != shape:
                check_inputs(apply_fn, batch, params=params)
                graph = param_uses(apply_fn, params, *inputs)
                before, observed, shape = observed, find_observed(graph, only), new_shape
                if step is not None:
                    check_alike(before, observed)
                else:
                    check_used(observed.followed, 'calibrate')
                    warn_of_unclear(observed.followed.unclear, 'have no statistics')
                taps = input_taps(observed.values, kind == 'gram')
                step = _step(taps, graph)
                if totals is None:
                    totals = on_explicit_mesh(_begin(taps, observed), (params, inputs))
            totals = step(totals, params, *inputs)
    if totals is None:
        raise ValueError('batches are empty; calibration needs at least one')
    by_leaf: dict[tree_lib.Path, list[CalibratedMatrices]] = {}
    for part in observed.parts:
        by_leaf.setdefault(part.path, []).append(
            CalibratedMatrices(part.matrices, _of_part(part, totals[part.value]))
        )
    return Calibration(
        {path: tuple(entries) for path, entries in by_leaf.items()}, observed.followed
    )


def _of_part(part: Part, statistics: InputStatistics) -> InputStatistics:
    """The statistics of those trips of loops that get a part of the leaf."""
    if part.matrices.of_all_trips:
        return statistics
    trips = tuple(slice(*ends) for ends in part.matrices.trips)
    return jax.tree.map(lambda array: array[trips] if array.ndim else array, statistics)


def _step(taps: Taps, graph: UseGraph) -> Callable[..., list[InputStatistics]]:
    """Adds the statistics of a batch, in place."""

    def step(totals: list[InputStatistics], params: Any, *inputs: Any) -> list[InputStatistics]:
        return taps.run(graph, totals, params, *inputs)[1]

    return CompiledOnce(step, donate_argnums=(0,))


def _begin(taps: Taps, observed: Observed) -> list[InputStatistics]:
    sizes = [
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(taps.zeros))
    ]
    logger.info(
        'calibration: statistics of %d leaves in %d places take %.1f MiB; only=… makes them fewer',
        len({part.path for part in observed.parts}),
        len(observed.values),
        sum(sizes) / 2**20,
    )
    return taps.zeros()
