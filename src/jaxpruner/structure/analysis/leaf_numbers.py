"""Which leaves of a traced model the leaves of another tree are: of all parameters, or of a subtree of them."""

from collections import Counter
from collections.abc import Collection

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.tree import Path
from jaxpruner.structure.analysis.records import Trace


def leaf_numbers(trace: Trace, paths: Collection[Path]) -> dict[Path, int]:
    """The number of each leaf in a trace, by its path; leaves that the model does not have are left out.

    A pruner may have a subtree of the parameters: `a/kernel` is `params/a/kernel` then.

    Raises:
      ValueError: none of the leaves is one of the model's, or they may be those of several subtrees.
    """
    number_of = trace.leaf_numbers
    prefix = _find_prefix(trace, paths)
    numbers = {}
    for path in paths:
        if (*prefix, *path) in number_of:
            numbers[path] = number_of[*prefix, *path]
    return numbers


def _find_prefix(trace: Trace, paths: Collection[Path]) -> Path:
    """The path of the subtree to which most leaves fit; the whole tree, if they fit to that."""
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
