"""Which leaves of a checkpoint are pruned, how far, and to which sparsity type."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.optimizer_state import find_optimizer_state
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.caller_warnings import warn

# Floats of 8 bits come with scales that stand in other tensors.
PRUNABLE = (
    np.dtype('float16'),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype('float32'),
    np.dtype('float64'),
)

_DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}


class Choice(NamedTuple):
    """What happens to a leaf.

    >>> Choice(0.5, sparsity_types.Unstructured()).sparsity
    0.5
    """

    sparsity: float  # share to remove; N:M removes its own, unless this is 0
    kind: sparsity_types.SparsityType


def choose(
    leaves: Mapping[str, Leaf],
    sparsity: float | None = None,
    distribution: Literal['uniform', 'erk'] = 'uniform',
    types: Sequence[tuple[str, str]] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> dict[str, Choice]:
    """Decides what happens to each leaf that is pruned.

    By default these are the floats of 16 to 64 bits with more than one dimension that are no optimizer's state. `only`
    and `skip` choose among these by globs; a leaf whose full name stands in `only` is pruned whatever its rank. What
    stays as it is, and why, is what `left_out` says.

    Args:
      leaves: all tensors of the checkpoint.
      sparsity: share to remove, in [0, 1]; not needed where all types are N:M.
      distribution: `'uniform'`, the same for each leaf, or `'erk'`.
      types: globs and config strings of sparsity types, or `'dense'`; the first match wins, without any a leaf is
        unstructured.
      only: globs of the leaves to prune; all that can be by default.
      skip: globs of leaves to leave as they are.

    Returns:
      By name, in the order of `leaves`, those that are pruned.

    Raises:
      ValueError: a setting is wrong, a name matches nothing, a type does not fit a shape, a leaf named in full has no
        floats that can be pruned, or nothing is chosen.

    >>> leaves = {'a': Leaf((4, 4), np.dtype('float32')), 'b': Leaf((4,), np.dtype('float32'))}
    >>> choose(leaves, 0.5, types=[('*', '2:4')])
    {'a': Choice(sparsity=0.5, kind=NByM(n=2, m=4, axis=-1, allow_partial=False))}
    """
    if distribution not in _DISTRIBUTIONS:
        raise ValueError(
            f'distribution: {distribution!r} is unknown; {tree_lib.nearest(distribution, _DISTRIBUTIONS)}'
        )
    if sparsity is not None:
        sparsity_distributions.check_sparsity(sparsity, 'sparsity')
    reasons = left_out(leaves, types, only, skip)
    kinds = {
        name: kind
        for name, kind in _kinds(leaves, types).items()
        if name not in reasons and kind is not None
    }
    if not kinds:
        raise ValueError(
            'no leaf is left to prune; those with more than one dimension and floats of 16 to 64 bits are, and vectors '
            'of such floats if their full name stands in only'
        )
    for name, kind in kinds.items():
        kind.check_shape(leaves[name].shape, name)
    _warn_of_own_shares(kinds, sparsity)
    if sparsity is None:
        return {name: Choice(_own_sparsity(name, kind), kind) for name, kind in kinds.items()}
    # Only those that are pruned, so that the budget is theirs.
    shapes = {name: jax.ShapeDtypeStruct(leaves[name].shape, np.float32) for name in kinds}
    share = functools.partial(_DISTRIBUTIONS[distribution], filter_fn=lambda path, leaf: True)
    targets = share(shapes, sparsity)
    return {name: Choice(float(targets[name]), kind) for name, kind in kinds.items()}


def _warn_of_own_shares(
    kinds: Mapping[str, sparsity_types.SparsityType], sparsity: float | None
) -> None:
    """Says so where no leaf has the sparsity that was asked for, since all have N:M types of another one."""
    shares = {}
    for kind in kinds.values():
        if not isinstance(kind, sparsity_types.NByM):
            return
        shares[f'{kind.n}:{kind.m} removes {1 - kind.n / kind.m:.4g}'] = 1 - kind.n / kind.m
    if sparsity and not any(math.isclose(share, sparsity) for share in shares.values()):
        warn(
            f'sparsity {sparsity} holds for no leaf: all are pruned to N:M, whose own share holds '
            f'({", ".join(shares)}); leave it out'
        )


def type_words(kind: sparsity_types.SparsityType) -> str:
    """A sparsity type in words.

    >>> type_words(sparsity_types.NByM(2, 4))
    '2:4 along axis -1'
    """
    match kind:
        case sparsity_types.NByM():
            return f'{kind.n}:{kind.m} along axis {kind.axis}'
        case sparsity_types.Block():
            return 'blocks of {}×{}'.format(*kind.block_shape)
        case sparsity_types.Channel():
            return f'channels of axis {kind.axis}'
    return 'unstructured'


def _own_sparsity(name: str, kind: sparsity_types.SparsityType) -> float:
    if not isinstance(kind, sparsity_types.NByM):
        raise ValueError(
            f'sparsity: {name} needs one, since its type is {type_words(kind)}; only N:M types can do without'
        )
    return 1 - kind.n / kind.m


def left_out(
    leaves: Mapping[str, Leaf],
    types: Sequence[tuple[str, str]] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> dict[str, str]:
    """Says of each leaf that is not pruned why it stays as it is.

    Args:
      leaves: as for `choose`.
      types: as for `choose`.
      only: as for `choose`.
      skip: as for `choose`.

    Returns:
      By name, in the order of `leaves`, a few words.

    Raises:
      ValueError: as `choose`.

    >>> leaf = Leaf((4, 4), np.dtype('float32'))
    >>> left_out({'kernel': leaf, 'opt_state/0/nu/kernel': leaf, 'bias': Leaf((4,), leaf.dtype)})
    {'opt_state/0/nu/kernel': "optimizer's state (nu)", 'bias': 'one dimension or none'}
    """
    paths = [(name,) for name in leaves]
    for setting, globs in (('only', only), ('skip', skip)):
        tree_lib.check_names(globs, paths, setting)
    _check_prunable(only, leaves, 'only')
    of_optimizer = find_optimizer_state(leaves)
    kinds = _kinds(leaves, types)

    def reason(name: str) -> str | None:
        if _any(skip, name):
            return 'named in skip'
        if name in of_optimizer and name not in only:
            field = of_optimizer[name].field
            return f"optimizer's state ({field})" if field else "optimizer's state"
        if leaves[name].dtype not in PRUNABLE:
            return f'{leaves[name].dtype.name}, which is not pruned'
        if kinds[name] is None:
            return 'of type dense'
        if name in only:
            return None
        if leaves[name].ndim < 2:
            return 'one dimension or none'
        return 'not named in only' if only and not _any(only, name) else None

    reasons = {name: reason(name) for name in leaves}
    return {name: words for name, words in reasons.items() if words is not None}


def _check_prunable(names: Sequence[str], leaves: Mapping[str, Leaf], setting: str) -> None:
    for name in names:
        if name in leaves and leaves[name].dtype not in PRUNABLE:
            known = ', '.join(dtype.name for dtype in PRUNABLE)
            raise ValueError(
                f'{setting}: {name} is {leaves[name].dtype}, which is not pruned; {known} are'
            )


def _any(globs: Sequence[str], name: str) -> bool:
    return any(tree_lib.matches(glob, (name,)) for glob in globs)


def _kinds(
    leaves: Mapping[str, Leaf], types: Sequence[tuple[str, str]]
) -> dict[str, sparsity_types.SparsityType | None]:
    kinds = [
        None if text == 'dense' else sparsity_types.parse_sparsity_type(text) for _, text in types
    ]
    globs = [glob for glob, _ in types]
    repeated = [glob for i, glob in enumerate(globs) if glob in globs[:i]]
    if repeated:
        raise ValueError(f'types: {repeated[0]!r} stands there twice; only the first would count')
    _check_prunable([glob for glob, text in types if text != 'dense'], leaves, 'types')
    rules = tree_lib.first_matches(globs, [(name,) for name in leaves], 'types')
    return {
        name: sparsity_types.Unstructured() if rule is None else kinds[rule]
        for name, rule in zip(leaves, rules, strict=True)
    }
