"""Runs a model on some batches and takes the statistics of what its weight matrices meet."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import on_explicit_mesh
from jaxpruner.oneshot.batches import (
    as_batches,
    as_inputs,
    check_inputs,
    check_samples,
    shapes_of,
)
from jaxpruner.oneshot.followed_leaves import (
    FollowedLeaves,
    check_used,
    follow_named_leaves,
    warn_of_unclear,
)
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.sample_weights import SampleWeights, check_samples_are_told, weights_of
from jaxpruner.oneshot.shared_inputs import check_alike, input_taps, inputs_key, uses_by_inputs
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.progress import progress_bar
from jaxpruner.trace import UseGraph, param_uses
from jaxpruner.trace.compiled_once import CompiledOnce
from jaxpruner.trace.taps import Taps

logger = logging.getLogger(__name__)

KINDS = ('second_moment', 'gram')


class CalibratedMatrices(NamedTuple):
    """Weight matrices of a leaf, and the statistics of their inputs.

    Attributes:
      matrices: how the model reads them from the leaf.
      statistics: of their inputs.

    >>> CalibratedMatrices(None, InputStatistics(2, jax.numpy.ones(3))).statistics.count
    2
    """

    matrices: WeightMatrices
    statistics: InputStatistics


class Calibration(Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]]):
    """Statistics by leaf path; a leaf has one entry for each way in which it is read, mostly one.

    >>> import jax.numpy as jnp
    >>> calibration = calibrate(lambda params, x: x @ params['w'], {'w': jnp.ones((2, 3))}, [jnp.eye(2)])
    >>> [entry.statistics.second_moment.tolist() for entry in calibration['w']]
    [[1.0, 1.0]]
    """

    def __init__(
        self,
        by_leaf: Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]],
        followed: FollowedLeaves | None = None,
    ):
        self._by_leaf = dict(by_leaf)
        # Of all leaves that were asked for: it says why some have no statistics.
        self.followed = followed

    def __getitem__(self, path: tree_lib.Path | str) -> tuple[CalibratedMatrices, ...]:
        for leaf_path, entries in self._by_leaf.items():
            if path in (leaf_path, tree_lib.path_string(leaf_path)):
                return entries
        name = path if isinstance(path, str) else tree_lib.path_string(path)
        names = map(tree_lib.path_string, self._by_leaf)
        raise KeyError(f'no statistics of {name!r}; {tree_lib.nearest(name, names)}')

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
    weights: SampleWeights | None = None,
) -> Calibration:
    """Takes statistics of the inputs of each leaf that is contracted with data, whatever the model's framework.

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
      weights: `batch -> array`, how much each position counts: of padding 0, of all others 1. The array has the shape
        of the leading axes of the inputs, such as `(batch, length)`. A model that puts other axes first inside, such
        as length before batch, needs weights in that order: shapes alone are compared. By default all count.

    Returns:
      Statistics by leaf path.

    Raises:
      TypeError: a batch holds another number of inputs than the model takes.
      ValueError: another kind, a name that matches no leaf, no batches or one without samples, a model that does not
        use its parameters, a leaf that `only` names in full and that no matrix can be read from (of other such leaves
        a warning tells), or leaves of whose inputs it is not clear which sample has which of the `weights`.
      UnsupportedPrimitive: a leaf that `only` names in full goes through an operation that is not understood.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}
    >>> batches = [jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])]
    >>> (entry,) = calibrate(lambda p, x: x @ p['w'] + p['b'], params, batches, kind='gram')['w']
    >>> int(entry.statistics.count), entry.statistics.gram.tolist()
    (2, [[10.0, 2.0], [2.0, 4.0]])
    """
    if kind not in KINDS:
        raise ValueError(f'kind is {" or ".join(map(repr, KINDS))}, got {kind!r}')
    program = None
    shapes = None
    totals = None
    batches = as_batches(batches)
    number_of_batches = len(batches) if isinstance(batches, Sized) else None
    with progress_bar(number_of_batches, progress) as show:
        for number, batch in enumerate(batches):
            show('calibrating', number, totals)
            inputs = as_inputs(batch)
            sample_weights = weights_of(batch, weights)
            if program is None or shapes_of((inputs, sample_weights)) != shapes:
                check_samples(batch, number)
                check_inputs(apply_fn, batch, params=params)
                before = program
                shapes = shapes_of((inputs, sample_weights))
                graph = param_uses(apply_fn, params, *inputs)
                program = _Program(graph, kind, only)
                check_samples_are_told(program.matrices, sample_weights)
                if before is None:
                    check_used(program.followed, 'calibrate')
                    warn_of_unclear(program.followed.unclear, 'have no statistics')
                    totals = on_explicit_mesh(program.zeros(), (params, inputs))
                else:
                    check_alike(before.matrices, program.matrices)
            totals = program.step(totals, sample_weights, params, *inputs)
    if program is None or totals is None:
        raise ValueError('batches are empty; calibration needs at least one')
    return program.calibration(totals)


class _Program:
    """A model for batches of one shape, and what adds their statistics to the totals."""

    def __init__(
        self, graph: UseGraph, kind: str, only: Sequence[str | tree_lib.Path] | str | None
    ):
        self.followed = follow_named_leaves(graph, only)
        self.matrices = self.followed.all_matrices
        self._uses = uses_by_inputs(self.matrices)
        self._taps = input_taps(self._uses.values(), kind == 'gram')
        self.step = _compile_step(self._taps, graph)

    def zeros(self) -> list[InputStatistics]:
        """Makes totals to begin with; says first how much memory they take."""
        shapes = jax.tree.leaves(jax.eval_shape(self._taps.zeros))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
        logger.info(
            'calibration: statistics of %d leaves in %d places take %.1f MiB; only=… makes them fewer',
            len(self.followed.matrices),
            len(self._uses),
            size / 2**20,
        )
        return self._taps.zeros()

    def calibration(self, totals: Sequence[InputStatistics]) -> Calibration:
        """Returns the totals by leaf."""
        by_inputs = dict(zip(self._uses, totals, strict=True))
        by_leaf = {}
        for path, matrices in self.followed.matrices.items():
            entries = []
            for part in matrices:
                statistics = _of_own_trips(part, by_inputs[inputs_key(part)])
                entries.append(CalibratedMatrices(part, statistics))
            by_leaf[path] = tuple(entries)
        return Calibration(by_leaf, self.followed)


def _compile_step(taps: Taps, graph: UseGraph) -> Callable[..., list[InputStatistics]]:
    """Compiles a function that adds the statistics of a batch, in place."""

    def step(
        totals: list[InputStatistics], sample_weights: Any, params: Any, *inputs: Any
    ) -> list[InputStatistics]:
        _, new_totals = taps.run(graph, totals, params, *inputs, given=(sample_weights,))
        return new_totals

    return CompiledOnce(step, donate_argnums=(0,))


def _of_own_trips(matrices: WeightMatrices, statistics: InputStatistics) -> InputStatistics:
    """Takes the statistics of those trips of loops that read this leaf; other trips read others."""
    if matrices.fills_stacks:
        return statistics
    slices = [slice(*axis.range) for axis in matrices.stack if axis.loop]
    trips = tuple(slices)

    def take(array: jax.Array) -> jax.Array:
        is_single_number = not array.ndim
        return array if is_single_number else array[trips]

    return jax.tree.map(take, statistics)
