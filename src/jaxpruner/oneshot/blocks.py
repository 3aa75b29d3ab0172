"""What sequential pruning prunes together: the leaves that meet one value, a trip of a scan, or what names say."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.shared_inputs import inputs_key
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.trace.program import inside
from jaxpruner.trace.segments import ModelSteps, ProgramCut

# A glob or a path, or several.
Names = str | Sequence[str | tree_lib.Path]


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

    @property
    def layer(self) -> int | None:
        """Which layer of their stacks the matrices are."""
        return self.matrices[0].layer


def find_blocks(
    matrices: Sequence[WeightMatrices], program: ModelSteps, blocks: Sequence[Names] | None = None
) -> list[Block]:
    """Finds the blocks of a model, in the order in which the program comes to them.

    `blocks` holds globs or paths for each block; within a scan they divide each of its trips. Other leaves form a block
    if they belong to the same trip of a scan, or, outside of scans, if they meet the same value.
    """
    together: dict[Any, list[WeightMatrices]] = {}
    for part in matrices:
        scan = program.scan_of(part.uses)
        number = block_of(part.path, blocks or ())
        shared_value = None
        if scan is None and number is None:
            shared_value = inputs_key(part)
        key = scan, number, shared_value
        together.setdefault(key, []).append(part)
    blocks_by_start: list[tuple[Any, Block]] = []
    for (scan, *_), parts in together.items():
        paths = [use.site.path for part in parts for use in part.uses]
        first = min(paths)
        if scan is None:
            start = program.place_of(first)
            stop = max(map(program.place_of, paths)) + 1
            block = Block(tuple(parts), ProgramCut(start), stop)
            blocks_by_start.append(((start, -1, first), block))
            continue
        loop: Any = inside(program.steps[scan].equation)
        for trip in range(loop.length):
            layer = loop.length - 1 - trip if loop.reverse else trip
            layers = tuple(part.at_layer(layer) for part in parts)
            block = Block(layers, ProgramCut(scan, trip), scan + 1)
            blocks_by_start.append(((scan, trip, first), block))
    blocks_by_start.sort(key=lambda start_and_block: start_and_block[0])
    return [block for _, block in blocks_by_start]


def find_cuts(blocks: Sequence[Block], program: ModelSteps) -> list[ProgramCut]:
    """Finds where batches are kept while the statistics of each block are taken: at or before its cut.

    What is kept of a batch differs in size from cut to cut: between the layers of a transformer it is one array, before
    the second product of an MLP it is five times the size. So a batch may stay at the cut of the block before if it
    takes less memory there, and is run from there again. It never does so for two blocks in turn. Hence a step is run
    three times at most: for the statistics of its own block, for those of the next block, and on to the cut after it.

    In this model `up` begins at steps 0, 4 and 8. Before it we keep 4 x 2 numbers of a batch. Before `down` we would
    keep 4 x 8 more numbers. So we keep the activation before `up`, and run `up` again. It is run for its own
    statistics, for those of `down`, and on to the next `up`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.oneshot.followed_leaves import follow_named_leaves
    >>> from jaxpruner.uses import param_uses
    >>> def apply(params, x):
    ...     for w in 'abc':
    ...         x = x + jnp.tanh(x @ params['up' + w]) @ params['down' + w]
    ...     return x
    >>> params = {name + w: jnp.ones(shape) for w in 'abc' for name, shape in (('up', (2, 8)), ('down', (8, 2)))}
    >>> graph = param_uses(apply, params, jnp.ones((4, 2)))
    >>> matrices = follow_named_leaves(graph).all_matrices
    >>> program = ModelSteps(graph, [use for part in matrices for use in part.uses])
    >>> [cut.step for cut in find_cuts(find_blocks(matrices, program), program)]
    [0, 0, 4, 4, 8, 8]
    """
    steps, sizes = _cheapest_steps(blocks, program.bytes_kept())
    # Of any two blocks in turn the smaller one is within the limit: there the batch moves on.
    limit = max(map(min, itertools.pairwise(sizes)), default=0)
    cuts = []
    here = ProgramCut(0)
    for block, step, size in zip(blocks, steps, sizes, strict=True):
        if step is None:
            here = block.cut
        elif here.trips is not None or (size <= limit and step > here.step):
            here = ProgramCut(step)
        cuts.append(here)
    return cuts


def block_of(path: tree_lib.Path, blocks: Sequence[Names]) -> int | None:
    """Finds the number of the first block that names a leaf, `None` if none does.

    >>> block_of(('layer_1', 'w'), ['layer_0/*', ('layer_1/*', 'head')])
    1
    """
    for number, names in enumerate(blocks):
        if tree_lib.matches_any(names, path):
            return number
    return None


def _cheapest_steps(
    blocks: Sequence[Block], kept_bytes: Sequence[int]
) -> tuple[list[int | None], list[int]]:
    """Finds for each block the step before which a batch takes least memory (`None` within a scan), and how much."""
    steps: list[int | None] = []
    sizes = []
    earliest = 0
    for block in blocks:
        step = None
        if block.cut.trips is None:
            last = block.cut.step
            candidates = range(min(earliest, last), last + 1)
            step = min(candidates, key=lambda step: (kept_bytes[step], -step))
        steps.append(step)
        sizes.append(0 if step is None else kept_bytes[step])
        earliest = max(earliest, block.stop)
    return steps, sizes
