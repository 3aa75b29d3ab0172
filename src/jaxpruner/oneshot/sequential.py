"""Statistics block by block: those of a block are taken when the blocks before it have been pruned."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

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
from jaxpruner.oneshot.blocks import Names, find_blocks, find_cuts
from jaxpruner.oneshot.calibration import CalibratedMatrices
from jaxpruner.oneshot.followed_leaves import follow_named_leaves
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.sample_weights import SampleWeights, check_samples_are_told, weights_of
from jaxpruner.oneshot.shared_inputs import check_alike, input_taps, inputs_key, uses_by_inputs
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.trace import UseGraph, param_uses
from jaxpruner.trace.segments import ProgramCut, Segments, State
from jaxpruner.trace.taps import Taps


class SequentialCalibration:
    """A model that is calibrated one block after another, with parameters that change in between.

    Of each batch some values are kept, those between two blocks: where a block begins with more than others, such as
    the second product of an MLP, it is run from where the block before it began. Each block is run two or three times:
    as it is, for its statistics, and once it is pruned.

    Arguments are those of `calibrate` (all batches are held at once), and `blocks` as in `CalibratedPruning`.

    Attributes:
      blocks: in the order in which they have to be pruned.
      matrices: of all leaves.

    Raises:
      ValueError, UnsupportedPrimitive: as in `calibrate`, or the blocks have no order.

    >>> import jax.numpy as jnp
    >>> params = {'a': jnp.eye(2), 'b': jnp.ones((2, 1))}
    >>> calibration = SequentialCalibration(lambda p, x: x @ p['a'] @ p['b'], params, [jnp.ones((1, 2))])
    >>> def squares(number):
    ...     ((_, statistics),) = calibration.take(number, params)
    ...     return statistics.second_moment.tolist()
    >>> squares(0)
    [1.0, 1.0]
    >>> params['a'] = 3 * params['a']  # it has been pruned
    >>> squares(1)
    [9.0, 9.0]
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: tree_lib.PyTree,
        batches: Iterable[Any],
        kind: str = 'second_moment',
        *,
        only: Sequence[str | tree_lib.Path] | str | None = None,
        blocks: Sequence[Names] | None = None,
        weights: SampleWeights | None = None,
    ):
        programs: dict[Any, _Program] = {}
        self._batches: list[_Batch] = []
        for number, batch in enumerate(as_batches(batches)):
            inputs = as_inputs(batch)
            sample_weights = weights_of(batch, weights)
            leaves, treedef = jax.tree.flatten((inputs, sample_weights))
            key = treedef, tuple(map(shapes_of, leaves))
            if key not in programs:
                check_samples(batch, number)
                check_inputs(apply_fn, batch)
                graph = param_uses(apply_fn, params, *inputs)
                matrices = follow_named_leaves(graph, only).all_matrices
                check_samples_are_told(matrices, sample_weights)
                programs[key] = _Program(graph, matrices, kind == 'gram', blocks)
            state = programs[key].segments.begin(*inputs)
            self._batches.append(_Batch(programs[key], state, ProgramCut(0), sample_weights))
        if not programs:
            raise ValueError('batches are empty; calibration needs at least one')
        first, *others = programs.values()
        self.blocks = first.blocks
        self.matrices = first.matrices
        _check_order(first, others)

    def take(
        self,
        number: int,
        params: tree_lib.PyTree,
        on_batch: Callable[[Any], None] = lambda totals: None,
    ) -> list[CalibratedMatrices]:
        """Takes the matrices of a block and their statistics; blocks have to be taken in their order.

        In `params` the blocks before it are pruned. `on_batch` is called with the totals after each batch.
        """
        totals: list[InputStatistics] | None = None
        for batch in self._batches:
            batch.advance(params, number)
            taps, observe = batch.program.observer_of(number)
            if totals is None:
                zeros = taps.zeros(batch.program.scan_path(number))
                totals = on_explicit_mesh(zeros, (params, batch.state))
            totals = observe(totals, params, batch.state, batch.cut.trips, batch.weights)
            on_batch(totals)
        matrices = self.blocks[number].matrices
        by_inputs = dict(zip(uses_by_inputs(matrices), totals or (), strict=True))
        return [CalibratedMatrices(part, by_inputs[inputs_key(part)]) for part in matrices]


class _Program:
    """A model for batches of one shape: its blocks, where each is calibrated from, and what observes them."""

    def __init__(
        self,
        graph: UseGraph,
        matrices: list[WeightMatrices],
        with_gram: bool,
        blocks: Sequence[Names] | None,
    ):
        self.matrices = matrices
        self._uses = uses_by_inputs(matrices)
        self.segments = Segments(graph, itertools.chain(*self._uses.values()))
        self.blocks = find_blocks(matrices, self.segments.program, blocks)
        self.cuts = find_cuts(self.blocks, self.segments.program)
        self._with_gram = with_gram
        # One compiled program for all trips of a scan.
        self._observer = functools.cache(self._make_observer)

    def order(self) -> list[Any]:
        """Tells what is pruned when, to be compared."""
        order = []
        for block in self.blocks:
            order.append([part.where for part in block.matrices])
        return order

    def scan_path(self, number: int) -> tuple[int, ...] | None:
        """Finds where the scan is of which a block is one trip."""
        if self.blocks[number].layer is None:
            return None
        return self.segments.program.steps[self.cuts[number].step].path

    def observer_of(self, number: int) -> tuple[Taps, Any]:
        """Makes the taps of a block, and the compiled function that adds their statistics to totals."""
        block = self.blocks[number]
        cut = self.cuts[number]
        start = ProgramCut(cut.step, None if block.layer is None else 0)
        inputs = tuple(uses_by_inputs(block.matrices))
        return self._observer(inputs, start, block.stop)

    def _make_observer(
        self, inputs: tuple[Hashable, ...], start: ProgramCut, stop: int
    ) -> tuple[Taps, Any]:
        uses = [self._uses[key] for key in inputs]
        taps = input_taps(uses, self._with_gram)
        return taps, self.segments.observe(taps, start, stop)


@dataclasses.dataclass
class _Batch:
    """What is kept of a batch, where in its program that is, and how much its samples count."""

    program: _Program
    state: State
    cut: ProgramCut
    weights: jax.Array | None

    def advance(self, params: tree_lib.PyTree, number: int) -> None:
        """Runs the batch on to where a block is calibrated from."""
        cut = self.program.cuts[number]
        self.state = self.program.segments.advance(params, self.state, self.cut, cut)
        self.cut = cut


def _check_order(first: _Program, others: Sequence[_Program]) -> None:
    """Refuses leaves that one loop goes through, and models whose order depends on shapes."""
    for part in first.matrices:
        if not part.fills_stacks:
            raise ValueError(
                f'{part.where}: a loop goes through this leaf and others, so that its trips '
                'cannot be pruned one after another; leave sequential out'
            )
    for other in others:
        check_alike(first.matrices, other.matrices)
        if other.order() != first.order():
            raise ValueError(
                'with batches of different shapes the model comes to its leaves in different orders, so that they '
                'cannot be pruned one after another; give batches of one shape'
            )
