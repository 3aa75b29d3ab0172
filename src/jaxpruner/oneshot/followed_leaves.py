"""Which leaves of a model can be pruned by what the model does with them, and why the others stay dense."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxpruner.core import caller_warnings
from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot.weight_matrices import UnknownWeightsError, WeightMatrices, find_matrices
from jaxpruner.uses import UseGraph

logger = logging.getLogger(__name__)


class FollowedLeaves(NamedTuple):
    """What is known of some leaves; each of them is in exactly one of the first four.

    Attributes:
      matrices: of leaves that contractions read, their weight matrices.
      unclear: leaves that contractions may read, but not as they are, and the reason.
      not_contracted: leaves that no contraction reads: lookups alone, biases, norms.
      unused: leaves that have no part in the results.
      looked_up: those of which data look up rows: embeddings, also where a contraction reads them, too (tied ones).

    >>> FollowedLeaves({}, {}, (), (), frozenset()).unclear
    {}
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

    def among(self, paths: Container[tree_lib.Path]) -> 'FollowedLeaves':
        """What is known of those leaves that are among some paths."""
        return FollowedLeaves(
            {path: found for path, found in self.matrices.items() if path in paths},
            {path: reason for path, reason in self.unclear.items() if path in paths},
            tuple(path for path in self.not_contracted if path in paths),
            tuple(path for path in self.unused if path in paths),
            self.looked_up,
        )


@contextlib.contextmanager
def ignore_vectors() -> Iterator[None]:
    """Ignores the warning that a filter takes stacked biases and norms for kernels: no contraction reads them.

    >>> with ignore_vectors():
    ...     pass
    """
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.*looks like a bias or norm')
        yield


def follow_leaves(graph: UseGraph, paths: Iterable[tree_lib.Path]) -> FollowedLeaves:
    """Sorts leaves by what the model does with them.

    Args:
      graph: of the model.
      paths: the leaves.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> params = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2), 'old': jnp.ones(2)}
    >>> graph = param_uses(lambda params, x: x @ params['w'] + params['b'], params, jnp.ones((4, 3)))
    >>> followed = follow_leaves(graph, [('w',), ('b',), ('old',)])
    >>> list(followed.matrices), followed.not_contracted, followed.unused
    ([('w',)], (('b',),), (('old',),))
    """
    matrices, unclear, not_contracted, unused = {}, {}, [], []
    for path in paths:
        if path in graph.unused:
            unused.append(path)
        elif path in graph.opaque:
            unclear[path] = graph.opaque[path]
        else:
            try:
                found = find_matrices(graph, path)
            except UnknownWeightsError as error:
                unclear[path] = error.reason
                continue
            if found:
                matrices[path] = found
            else:
                not_contracted.append(path)
    looked_up = frozenset(path for path in graph if any(use.op == 'gather' for use in graph[path]))
    return FollowedLeaves(matrices, unclear, tuple(not_contracted), tuple(unused), looked_up)


def warn_of_unclear(unclear: Mapping[tree_lib.Path, str], consequence: str = 'stay dense') -> None:
    """One warning for all leaves that cannot be followed.

    Args:
      unclear: reasons by path.
      consequence: what becomes of them.

    >>> warn_of_unclear({})
    """
    if unclear:
        reasons = '; '.join(
            f'{tree_lib.path_string(path)}: {reason}' for path, reason in unclear.items()
        )
        names = ', '.join(f"'{tree_lib.path_string(path)}': None" for path in unclear)
        caller_warnings.warn(
            f'these leaves {consequence}, since the model does not read them as they are: {reasons}. Where that is '
            f"meant, say so: sparsity_type={{{names}, '*': …}}"
        )


def choose_leaves(
    followed: FollowedLeaves, is_named: Callable[[tree_lib.Path], bool], algorithm: str
) -> list[tree_lib.Path]:
    """The leaves to prune; says of the others why they stay dense.

    Args:
      followed: the leaves that are selected.
      is_named: whether a setting names the leaf itself, which also prunes a tied embedding.
      algorithm: what prunes, for messages.

    Raises:
      ValueError: none of the leaves has a part in the results, or none is left.

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
        names = ', '.join(map(tree_lib.path_string, dict.fromkeys(dense)))
        raise ValueError(
            f'{algorithm} has nothing to prune: of the leaves that are selected ({names}) none is a weight matrix that '
            'a contraction reads. Select others by filter_fn, or name embeddings in custom_sparsity_map'
        )
    return chosen


def leave_alone(
    followed: FollowedLeaves, is_named: Callable[[tree_lib.Path], bool]
) -> set[tree_lib.Path]:
    """Leaves that stay dense unless a setting names them: lookups, tied ones, too, and what no contraction reads.

    Args:
      followed: the leaves that are selected; each one that is left alone is logged.
      is_named: whether a setting names the leaf itself.

    >>> leave_alone(FollowedLeaves({}, {}, (('bias',),), (), frozenset()), lambda path: False)
    {('bias',)}
    """
    found = set()
    for path in (*followed.matrices, *followed.not_contracted):
        is_looked_up = path in followed.looked_up
        if is_named(path) or (path in followed.matrices and not is_looked_up):
            continue
        found.add(path)
        name = tree_lib.path_string(path)
        reason = (
            'data look up its rows (an embedding)' if is_looked_up else 'no contraction reads it'
        )
        logger.info(
            "%s stays dense: %s; to prune it, name it: custom_sparsity_map={'%s': 0.5}",
            name,
            reason,
            name,
        )
    return found


def check_used(followed: FollowedLeaves, algorithm: str) -> None:
    """Refuses a model that does not use its parameters, and warns of leaves that it does not use.

    Args:
      followed: the leaves that are selected.
      algorithm: what prunes, for the message.

    Raises:
      ValueError: none of the leaves has a part in the results.

    >>> check_used(FollowedLeaves({}, {}, (), (), frozenset()), 'Wanda')
    """
    names = ', '.join(map(tree_lib.path_string, followed.unused))
    if followed.unused and not (followed.matrices or followed.unclear or followed.not_contracted):
        raise ValueError(
            f'{algorithm}: what apply_fn returns does not depend on the leaves that are to be pruned ({names}), so '
            'that it does not use its first argument. Apply the model to the params that it is given: lambda params, '
            'x: model.apply(params, x); with nnx merge them first: nnx.merge(graphdef, params)(x)'
        )
    if followed.unused:
        plural = len(followed.unused) > 1
        keys = ', '.join(f"'{tree_lib.path_string(path)}': None" for path in followed.unused)
        caller_warnings.warn(
            f'{names}: {"these leaves have" if plural else "this leaf has"} no part in what apply_fn returns, and '
            f'{"stay" if plural else "stays"} dense; if that is meant, say so: sparsity_type={{{keys}, '
            "'*': …}"
        )
