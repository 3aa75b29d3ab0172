"""What sequential pruning prunes together: the leaves that meet one value, a trip of a scan, or what names say."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpruner import tree as tree_lib
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


def find_blocks(observed: Observed, program: Steps, blocks: Sequence[Names] | None = None) -> list[Block]:
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
            ordered.append(((scan, trip, min(paths)), Block(tuple(parts), Cut(scan, trip), scan + 1, layer)))
    return [block for _, block in sorted(ordered, key=lambda pair: pair[0])]


def block_of(path: tree_lib.Path, blocks: Sequence[Names]) -> int | None:
    """The number of the first block that names a leaf, `None` if none does.

    Args:
      path: the leaf's.
      blocks: globs or paths for each block.

    >>> block_of(('layer_1', 'w'), ['layer_0/*', ('layer_1/*', 'head')])
    1
    """
    for number, names in enumerate(blocks):
        if any(tree_lib.matches(name, path) for name in ((names,) if isinstance(names, str) else names)):
            return number
    return None
