"""What sequential pruning prunes together: the leaves that meet one value, a trip of a scan, or what names say."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot.observed import Observed
from jaxpruner.uses import bodies
from jaxpruner.uses.segments import Cut
from jaxpruner.uses.steps import Steps

# A glob or a path, or several.
Names = str | Sequence[str | tree_lib.Path]


class Block(NamedTuple):
    """Weight matrices that are pruned together.

    Attributes:
      parts: their numbers among those that are observed.
      cut: where the program has to be run to before.
      stop: the step before which all of their inputs are known.
      layer: which layer of their stacks, `None` for all or where they are no stacks.

    >>> Block((0, 1), Cut(0), 1).layer is None
    True
    """

    parts: tuple[int, ...]
    cut: Cut
    stop: int
    layer: int | None = None


def find_blocks(
    observed: Observed, program: Steps, blocks: Sequence[Names] | None = None
) -> list[Block]:
    """The blocks of a model, in the order in which the program comes to them.

    Args:
      observed: what is calibrated.
      program: of the model.
      blocks: globs or paths for each block; within a scan each of its trips is divided so. Of other leaves a trip of a
        scan is a block, and outside those that meet the same value are.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.oneshot.observed import find_observed
    >>> from jaxpruner.uses import param_uses
    >>> def apply(params, x):
    ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params['stack'])
    ...     return x @ params['out']
    >>> graph = param_uses(apply, {'stack': jnp.ones((2, 3, 3)), 'out': jnp.ones((3, 1))}, jnp.ones((4, 3)))
    >>> observed = find_observed(graph)
    >>> program = Steps(graph, [use for uses in observed.values for use in uses])
    >>> [([observed.parts[i].path for i in block.parts], block.layer) for block in find_blocks(observed, program)]
    [([('stack',)], 0), ([('stack',)], 1), ([('out',)], None)]
    """
    together: dict[tuple[int | None, int, int], list[int]] = {}
    for number, part in enumerate(observed.parts):
        scan, named = program.scan_of(part.matrices.uses), block_of(part.path, blocks or ())
        alone = part.value if named is None and scan is None else -1
        together.setdefault((scan, -1 if named is None else named, alone), []).append(number)
    ordered = []
    for (scan, *_), parts in together.items():
        paths = [use.site.path for number in parts for use in observed.parts[number].matrices.uses]
        first, stop = program.place_of(min(paths)), max(map(program.place_of, paths)) + 1
        if scan is None:
            ordered.append(((first, -1, min(paths)), Block(tuple(parts), Cut(first), stop)))
            continue
        equation = program.steps[scan].equation
        length = bodies.Scan.of(equation).length
        for trip in range(length):
            layer = length - 1 - trip if equation.params['reverse'] else trip
            ordered.append(
                ((scan, trip, min(paths)), Block(tuple(parts), Cut(scan, trip), scan + 1, layer))
            )
    return [block for _, block in sorted(ordered, key=lambda pair: pair[0])]


def find_cuts(blocks: Sequence[Block], program: Steps) -> list[Cut]:
    """Where batches are kept while the statistics of each block are taken: at or before its cut.

    From one cut to the next the values differ that are kept of a batch: between the layers of a transformer they are
    one array, before the second product of its MLP five times as much. A batch stays where it is if that takes less,
    and is run from there, but for no two blocks in turn, so that each step is run no more than three times.

    Args:
      blocks: in their order.
      program: of the model.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.oneshot.observed import find_observed
    >>> from jaxpruner.uses import param_uses
    >>> def apply(params, x):
    ...     for w in 'abc':
    ...         x = x + jnp.tanh(x @ params['up' + w]) @ params['down' + w]
    ...     return x
    >>> params = {name + w: jnp.ones(shape) for w in 'abc' for name, shape in (('up', (2, 8)), ('down', (8, 2)))}
    >>> graph = param_uses(apply, params, jnp.ones((4, 2)))
    >>> observed = find_observed(graph)
    >>> program = Steps(graph, [use for uses in observed.values for use in uses])
    >>> [cut.step for cut in find_cuts(find_blocks(observed, program), program)]
    [0, 0, 4, 4, 8, 8]
    """
    kept = program.bytes_kept()
    places: list[int | None] = []  # `None` within a scan
    earliest = 0
    for block in blocks:
        first = block.cut.step
        if block.cut.trips is None:
            candidates = range(min(earliest, first), first + 1)
            places.append(min(candidates, key=lambda place: (kept[place], -place)))
        else:
            places.append(None)
        earliest = max(earliest, block.stop)
    sizes = [0 if place is None else kept[place] for place in places]
    limit = max((min(pair) for pair in itertools.pairwise(sizes)), default=0)
    cuts, here = [], Cut(0)
    for block, place, size in zip(blocks, places, sizes, strict=True):
        if place is None:
            here = block.cut
        elif here.trips is not None or (size <= limit and place > here.step):
            here = Cut(place)
        cuts.append(here)
    return cuts


def block_of(path: tree_lib.Path, blocks: Sequence[Names]) -> int | None:
    """The number of the first block that names a leaf, `None` if none does.

    Args:
      path: the leaf's.
      blocks: globs or paths for each block.

    >>> block_of(('layer_1', 'w'), ['layer_0/*', ('layer_1/*', 'head')])
    1
    """
    for number, names in enumerate(blocks):
        if any(
            tree_lib.matches(name, path) for name in ((names,) if isinstance(names, str) else names)
        ):
            return number
    return None
