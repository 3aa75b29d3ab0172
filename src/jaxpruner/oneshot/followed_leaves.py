"""Which leaves of a model can be pruned by what the model does with them, and why the others stay dense."""

import contextlib
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpruner import caller_warnings
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.weight_matrices import UnknownWeightsError, WeightMatrices, find_matrices
from jaxpruner.trace import UseGraph

IsNamed = Callable[[tree_lib.Path], bool]


class FollowedLeaves(NamedTuple):
    """How a model uses some leaves.

    Each leaf is in exactly one of `matrices`, `unclear`, `not_contracted` and `unused`. Beside that, `looked_up` tells
    which leaves of the whole model are embeddings. An embedding that only data look up is in `not_contracted`, too; a
    tied one, which a contraction also reads, is in `matrices`, too.

    Attributes:
      matrices: of leaves that contractions read, their weight matrices.
      unclear: leaves of which it is not clear which weight meets which input, and the reason.
      not_contracted: leaves that no contraction reads: embeddings, biases, norms.
      unused: leaves that have no part in the results.
      looked_up: leaves of which data look up rows, whether they were asked for or not.
    """

    matrices: dict[tree_lib.Path, tuple[WeightMatrices, ...]]
    unclear: dict[tree_lib.Path, str]
    not_contracted: tuple[tree_lib.Path, ...]
    unused: tuple[tree_lib.Path, ...]
    looked_up: frozenset[tree_lib.Path]

    @property
    def paths(self) -> list[tree_lib.Path]:
        """All leaves."""
        return [*self.matrices, *self.unclear, *self.not_contracted, *self.unused]

    @property
    def all_matrices(self) -> list[WeightMatrices]:
        """The weight matrices of all leaves."""
        return [part for matrices in self.matrices.values() for part in matrices]

    def among(self, paths: Container[tree_lib.Path]) -> 'FollowedLeaves':
        """Picks those of the leaves that are among some paths."""
        return FollowedLeaves(
            {path: self.matrices[path] for path in self.matrices if path in paths},
            {path: self.unclear[path] for path in self.unclear if path in paths},
            tuple(filter(paths.__contains__, self.not_contracted)),
            tuple(filter(paths.__contains__, self.unused)),
            self.looked_up,
        )


@contextlib.contextmanager
def ignore_vectors() -> Iterator[None]:
    """Ignores the warning that a filter takes stacked biases and norms for kernels: no contraction reads them."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.*looks like a bias or norm')
        yield


def follow_leaves(graph: UseGraph, paths: Iterable[tree_lib.Path]) -> FollowedLeaves:
    """Sorts leaves by what the model does with them.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> params = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2), 'old': jnp.ones(2)}
    >>> graph = param_uses(lambda params, x: x @ params['w'] + params['b'], params, jnp.ones((4, 3)))
    >>> followed = follow_leaves(graph, [('w',), ('b',), ('old',)])
    >>> list(followed.matrices), followed.not_contracted, followed.unused
    ([('w',)], (('b',),), (('old',),))
    """
    matrices = {}
    unclear = {}
    not_contracted = []
    unused = []
    for path in paths:
        if path in graph.unused:
            unused.append(path)
        elif path in graph.opaque:
            unclear[path] = graph.opaque[path]
        else:
            try:
                of_leaf = find_matrices(graph, path)
            except UnknownWeightsError as error:
                unclear[path] = error.reason
                continue
            if of_leaf:
                matrices[path] = of_leaf
            else:
                not_contracted.append(path)
    looked_up = set()
    for path, uses in graph.items():
        if any(use.op == 'gather' for use in uses):
            looked_up.add(path)
    return FollowedLeaves(
        matrices, unclear, tuple(not_contracted), tuple(unused), frozenset(looked_up)
    )


def follow_named_leaves(
    graph: UseGraph, only: Sequence[str | tree_lib.Path] | str | None = None
) -> FollowedLeaves:
    """Sorts the leaves that names, globs or paths match; by default all leaves.

    Raises:
      ValueError: a name matches no leaf, or no matrix can be read from a leaf that is named in full, or from any.
      UnsupportedPrimitive: a leaf that is named in full goes through an operation that is not understood.
    """
    paths: list[tree_lib.Path] = [*graph, *graph.opaque, *graph.unused]
    names: Sequence[Any] = ('*',)
    if only is not None:
        names = (only,) if isinstance(only, str) else only
        tree_lib.check_names(names, paths, 'only')

    def is_asked_for(path: tree_lib.Path) -> bool:
        return any(tree_lib.matches(name, path) for name in names)

    followed = follow_leaves(graph, filter(is_asked_for, paths))
    for path in followed.unclear:
        is_named_in_full = path in names or tree_lib.path_string(path) in names
        if is_named_in_full or not followed.matrices:
            find_matrices(graph, path)  # raises, with the reason and the remedy
    return followed


def warn_of_unclear(unclear: Mapping[tree_lib.Path, str], consequence: str = 'stay dense') -> None:
    """Warns once of all leaves that cannot be followed; `unclear` maps their paths to reasons."""
    if not unclear:
        return
    reasons = []
    for path, reason in unclear.items():
        reasons.append(f'{tree_lib.path_string(path)}: {reason}')
    caller_warnings.warn(
        f'these leaves {consequence}, since it is not clear which of their weights meets which input: '
        f'{"; ".join(reasons)}. A setting that leaves them out avoids this warning, such as {_dense_setting(unclear)}'
    )


def choose_leaves(
    followed: FollowedLeaves, is_named: IsNamed, algorithm: str
) -> list[tree_lib.Path]:
    """Chooses the leaves to prune; warns of those that cannot be followed, or have no part in the results.

    A tied embedding is pruned only if a setting names it.

    Raises:
      ValueError: no leaf has a part in the results, or none is left to prune.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> def apply_fn(params, numbers):
    ...     return params['tokens'][numbers] @ params['w'] @ params['tokens'].T
    >>> params = {'tokens': jnp.ones((5, 2)), 'w': jnp.ones((2, 2))}
    >>> followed = follow_leaves(param_uses(apply_fn, params, jnp.arange(2)), [('tokens',), ('w',)])
    >>> choose_leaves(followed, lambda path: False, 'Wanda')
    [('w',)]
    """
    check_used(followed, algorithm)
    warn_of_unclear(followed.unclear)
    left_alone = leave_alone(followed, is_named)
    chosen = [path for path in followed.matrices if path not in left_alone]
    dense = [*followed.not_contracted, *left_alone, *followed.unused, *followed.unclear]
    if dense and not chosen:
        raise ValueError(
            f'{algorithm} has nothing to prune: of the leaves that are selected ({_names(dict.fromkeys(dense))}) none '
            'is a weight matrix that a contraction reads. Select others by filter_fn, or name embeddings in '
            'custom_sparsity_map'
        )
    return chosen


def leave_alone(followed: FollowedLeaves, is_named: IsNamed) -> set[tree_lib.Path]:
    """Finds leaves that only a setting that names them prunes: lookups, tied or not, and what no contraction reads."""
    left_alone = set()
    for path in (*followed.matrices, *followed.not_contracted):
        is_looked_up = path in followed.looked_up
        is_mere_matrix = path in followed.matrices and not is_looked_up
        if not is_mere_matrix and not is_named(path):
            left_alone.add(path)
    return left_alone


def why_left_dense(path: tree_lib.Path, followed: FollowedLeaves) -> str:
    """Tells why a leaf stays dense that no setting names."""
    if path in followed.unused:
        return 'it has no part in what apply_fn returns'
    if path in followed.unclear:
        return followed.unclear[path]
    if path in followed.looked_up:
        return 'data look up its rows (an embedding); a setting that names it prunes it'
    return 'no contraction reads it'


def check_used(followed: FollowedLeaves, algorithm: str) -> None:
    """Warns of leaves that the model does not use.

    Raises:
      ValueError: it uses none of the leaves.
    """
    if not followed.unused:
        return
    names = _names(followed.unused)
    if len(followed.unused) == len(followed.paths):
        raise ValueError(
            f'{algorithm}: what apply_fn returns does not depend on the leaves that are to be pruned ({names}), so '
            'that it does not use its first argument. Apply the model to the params that it is given: lambda params, '
            'x: model.apply(params, x); with nnx merge them first: nnx.merge(graphdef, params)(x)'
        )
    is_plural = len(followed.unused) > 1
    caller_warnings.warn(
        f'{names}: {"these leaves have" if is_plural else "this leaf has"} no part in what apply_fn returns, and '
        f'{"stay" if is_plural else "stays"} dense. A setting that leaves {"them" if is_plural else "it"} out avoids '
        f'this warning, such as {_dense_setting(followed.unused)}'
    )


def _names(paths: Iterable[tree_lib.Path]) -> str:
    return ', '.join(map(tree_lib.path_string, paths))


def _dense_setting(paths: Iterable[tree_lib.Path]) -> str:
    """Makes the setting under which some leaves stay dense."""
    keys = [f"'{tree_lib.path_string(path)}': None" for path in paths]
    return f"sparsity_type={{{', '.join(keys)}, '*': …}}"
