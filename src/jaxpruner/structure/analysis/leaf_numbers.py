"""Matches the leaves of another tree, or of a subtree, with the leaves of a traced model."""

from collections import Counter
from collections.abc import Collection

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.tree import Path


def leaf_numbers(trace: Trace, paths: Collection[Path]) -> dict[Path, int]:
    """Finds the number in a trace of each of these leaves. Leaves that the model does not have are left out.

    A pruner may have a subtree of the parameters. Then `a/kernel` is `params/a/kernel`.

    Raises:
      ValueError: the model has none of these leaves, or has them in several subtrees.
    """
    number_of = trace.leaf_numbers
    prefix = _find_prefix(trace, paths)
    numbers = {}
    for path in paths:
        if (*prefix, *path) in number_of:
            numbers[path] = number_of[*prefix, *path]
    return numbers


def _find_prefix(trace: Trace, paths: Collection[Path]) -> Path:
    """The path of the subtree that has most of these leaves. It is `()` if the whole tree has one of them."""
    own_paths = set(trace.paths)
    if not paths or not own_paths.isdisjoint(paths):
        return ()
    counts: Counter[Path] = Counter()
    for path in paths:
        for own_path in trace.paths:
            depth = len(own_path) - len(path)
            prefix, end = own_path[:depth], own_path[depth:]
            if end == path:
                counts[prefix] += 1
    most = max(counts.values(), default=0)
    best = [prefix for prefix, count in counts.items() if count == most]
    if len(best) == 1:
        return best[0]
    names = ', '.join(sorted(map(tree_lib.path_string, paths)))
    if not best:
        raise ValueError(
            f'none of the leaves {names} is a parameter of the graph, which has '
            f'{", ".join(map(tree_lib.path_string, trace.paths))}'
        )
    raise ValueError(
        f'the leaves {names} may be those of {" or ".join(map(tree_lib.path_string, best))}; make the graph of '
        'parameters with other names, or give the whole tree to the pruner'
    )
