"""Statistics block by block: those of a block are taken when the blocks before it have been pruned.

Each batch is run from block to block, and its values are kept in between. So each part of the model is run twice on
it: for its statistics, and once it is pruned.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import on_explicit_mesh
from jaxpruner.oneshot import batches as batches_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.calibrate import (
    CalibratedMatrices,
    SampleWeights,
    check_alike,
    check_samples_are_told,
    input_taps,
    inputs_key,
    uses_by_inputs,
    weights_of,
)
from jaxpruner.oneshot.matrices import WeightMatrices
from jaxpruner.oneshot.owl import Names, block_of
from jaxpruner.trace.program import ProgramPath
from jaxpruner.trace.segments import Segments, element_of


class Block(NamedTuple):
    """Weight matrices that are pruned together.

    Attributes:
      matrices: whole stacks, or one layer of each.
      start: the first step of the program that reads one of them.
      stop: the step after the last one.
      scan: path of the scan that takes the layers apart.
    """

    matrices: tuple[WeightMatrices, ...]
    start: int
    stop: int
    scan: ProgramPath | None


def find_blocks(
    matrices: Sequence[WeightMatrices], segments: Segments, blocks: Sequence[Names] = ()
) -> list[Block]:
    """Finds the blocks of a model, in the order in which the program comes to them.

    `blocks` holds globs or paths for each block; within a scan they divide each of its trips. Other leaves form a block
    if they belong to the same trip of a scan, or, outside of scans, if they meet the same value.
    """
    together: dict[Any, list[WeightMatrices]] = {}
    for part in matrices:
        path, number = segments.scan_of(part.uses), block_of(part.path, blocks)
        value = inputs_key(part) if path is None and number is None else None
        together.setdefault((path, number, value), []).append(part)
    found = []
    for (path, *_), parts in together.items():
        scan = segments.scans[path] if path is not None else None
        for trip in [None] if scan is None else range(scan.length):
            layer = None if scan is None or trip is None else element_of(scan, trip)
            of_trip = tuple(part.at_layer(layer) for part in parts)
            spans = [segments.span_of(use, trip) for part in parts for use in part.uses]
            start, stop = min(first for first, _ in spans), max(last for _, last in spans) + 1
            found.append(Block(of_trip, start, stop, path))
    return sorted(found, key=lambda block: block.start)


class _Program:
    """A model for batches of one shape, and these batches: the values of each at a step, and its weights."""

    def __init__(self, matrices: list[WeightMatrices], graph: Any, blocks: Sequence[Names]):
        self.matrices = matrices
        self.segments = Segments(graph, itertools.chain(*uses_by_inputs(matrices).values()))
        self.blocks = find_blocks(matrices, self.segments, blocks)
        self.batches: list[tuple[Any, Any]] = []
        self.step = 0


class SequentialCalibration:
    """A model that is calibrated one block after another, with parameters that change in between.

    Arguments are those of `calibrate` (all batches are held at once), and `blocks` as in `CalibratedPruning`.

    Attributes:
      blocks: in the order in which they have to be pruned.

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
        self._with_gram = kind == 'gram'
        programs: dict[Any, _Program] = {}
        for number, batch in enumerate(batches_lib.as_batches(batches)):
            inputs = batches_lib.as_inputs(batch)
            own_weights = weights_of(batch, weights)
            leaves, treedef = jax.tree.flatten((inputs, own_weights))
            key = treedef, tuple(map(batches_lib.shapes_of, leaves))
            if key not in programs:
                graph = leaves_lib.trace_model(apply_fn, params, batch, number)
                matrices = leaves_lib.follow_named_leaves(graph, only).all_matrices
                check_samples_are_told(matrices, own_weights)
                programs[key] = _Program(matrices, graph, blocks or ())
            program = programs[key]
            program.batches.append((program.segments.begin(*inputs), own_weights))
        if not programs:
            raise ValueError('batches are empty; calibration needs at least one')
        self._programs = list(programs.values())
        first, *others = self._programs
        self.blocks = first.blocks
        for part in first.matrices:
            if not part.fills_stacks:
                raise ValueError(
                    f'{part.where}: a loop goes through this leaf and others, so that its trips '
                    'cannot be pruned one after another; leave sequential out'
                )
        for other in others:
            check_alike(first.matrices, other.matrices)
            orders = [
                [[part.where for part in block.matrices] for block in each.blocks]
                for each in (first, other)
            ]
            if orders[0] != orders[1]:
                raise ValueError(
                    'with batches of different shapes the model comes to its leaves in different orders, so that they '
                    'cannot be pruned one after another; give batches of one shape'
                )

    def take(
        self,
        number: int,
        params: tree_lib.PyTree,
        on_batch: Callable[[Any], None] = lambda totals: None,
    ) -> list[CalibratedMatrices]:
        """Takes the matrices of a block and their statistics; blocks have to be taken in their order.

        In `params` the blocks before it are pruned. `on_batch` is called with the totals after each batch.
        """
        totals: Any = None
        for program in self._programs:
            block = program.blocks[number]
            taps = input_taps(uses_by_inputs(block.matrices).values(), self._with_gram)
            advance = program.segments.advance(params, program.step, block.start)
            observe = program.segments.observe(taps, params, block.start, block.stop)
            program.step = block.start
            for i, (values, weights) in enumerate(program.batches):
                values = advance(values)
                program.batches[i] = values, weights
                if totals is None:
                    totals = on_explicit_mesh(taps.zeros(block.scan), (params, values))
                totals = observe(totals, values, weights)
                on_batch(totals)
        matrices = self.blocks[number].matrices
        by_inputs = dict(zip(uses_by_inputs(matrices), totals, strict=True))
        return [CalibratedMatrices(part, by_inputs[inputs_key(part)]) for part in matrices]
