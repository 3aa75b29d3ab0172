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
from jaxpruner.oneshot import sample_weights
from jaxpruner.oneshot.calibrate import (
    CalibratedMatrices,
    check_alike,
    input_taps,
    inputs_key,
    uses_by_inputs,
)
from jaxpruner.oneshot.matrices import WeightMatrices
from jaxpruner.oneshot.owl import Names, block_of
from jaxpruner.trace.program import inside
from jaxpruner.trace.segments import ModelSteps, ProgramCut, Segments


class Block(NamedTuple):
    """Weight matrices that are pruned together.

    Attributes:
      matrices: whole stacks, or one layer of each.
      cut: where the program stands before the block.
      stop: the step before which all of their inputs are known.
    """

    matrices: tuple[WeightMatrices, ...]
    cut: ProgramCut
    stop: int


def find_blocks(
    matrices: Sequence[WeightMatrices], program: ModelSteps, blocks: Sequence[Names] = ()
) -> list[Block]:
    """Finds the blocks of a model, in the order in which the program comes to them.

    `blocks` holds globs or paths for each block; within a scan they divide each of its trips. Other leaves form a block
    if they belong to the same trip of a scan, or, outside of scans, if they meet the same value.
    """
    together: dict[Any, list[WeightMatrices]] = {}
    for part in matrices:
        scan, number = program.scan_of(part.uses), block_of(part.path, blocks)
        value = inputs_key(part) if scan is None and number is None else None
        together.setdefault((scan, number, value), []).append(part)
    found: list[tuple[Any, Block]] = []
    for (scan, *_), parts in together.items():
        paths = [use.site.path for part in parts for use in part.uses]
        if scan is None:
            start = program.place_of(min(paths))
            stop = max(map(program.place_of, paths)) + 1
            found.append(((start, -1, min(paths)), Block(tuple(parts), ProgramCut(start), stop)))
            continue
        loop: Any = inside(program.steps[scan].equation)
        for trip in range(loop.length):
            layer = loop.length - 1 - trip if loop.reverse else trip
            layers = tuple(part.at_layer(layer) for part in parts)
            block = Block(layers, ProgramCut(scan, trip), scan + 1)
            found.append(((scan, trip, min(paths)), block))
    return [block for _, block in sorted(found, key=lambda start_and_block: start_and_block[0])]


class _Program(NamedTuple):
    """A model for batches of one shape."""

    matrices: list[WeightMatrices]
    segments: Segments
    blocks: list[Block]
    observers: dict[Any, Any]  # a trip of a scan has the compiled program of all its trips


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
        weights: sample_weights.SampleWeights | None = None,
    ):
        self._with_gram = kind == 'gram'
        programs: dict[Any, _Program] = {}
        # Of each batch its program, the values that are kept of it, where in the program that is, and its weights.
        self._batches: list[list[Any]] = []
        for number, batch in enumerate(batches_lib.as_batches(batches)):
            inputs = batches_lib.as_inputs(batch)
            own_weights = sample_weights.weights_of(batch, weights)
            leaves, treedef = jax.tree.flatten((inputs, own_weights))
            key = treedef, tuple(map(batches_lib.shapes_of, leaves))
            if key not in programs:
                graph = leaves_lib.trace_model(apply_fn, params, batch, number)
                matrices = leaves_lib.follow_named_leaves(graph, only).all_matrices
                sample_weights.check_samples_are_told(matrices, own_weights)
                segments = Segments(graph, itertools.chain(*uses_by_inputs(matrices).values()))
                found = find_blocks(matrices, segments.program, blocks or ())
                programs[key] = _Program(matrices, segments, found, {})
            state = programs[key].segments.begin(*inputs)
            self._batches.append([programs[key], state, ProgramCut(0), own_weights])
        if not programs:
            raise ValueError('batches are empty; calibration needs at least one')
        first, *others = programs.values()
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
        for batch in self._batches:
            program, state, here, weights = batch
            block = program.blocks[number]
            batch[1] = state = program.segments.advance(params, state, here, block.cut)
            batch[2] = block.cut
            step, trips = block.cut
            start = block.cut if trips is None else ProgramCut(step, 0)
            uses = uses_by_inputs(block.matrices)
            key = tuple(uses), start, block.stop
            if key not in program.observers:
                taps = input_taps(uses.values(), self._with_gram)
                observe = program.segments.observe(taps, start, block.stop)
                program.observers[key] = taps, observe
            taps, observe = program.observers[key]
            if totals is None:
                scan = None if trips is None else program.segments.program.steps[step].path
                totals = on_explicit_mesh(taps.zeros(scan), (params, state))
            totals = observe(totals, params, state, trips, weights)
            on_batch(totals)
        matrices = self.blocks[number].matrices
        by_inputs = dict(zip(uses_by_inputs(matrices), totals, strict=True))
        return [CalibratedMatrices(part, by_inputs[inputs_key(part)]) for part in matrices]
