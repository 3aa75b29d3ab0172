"""Which leaves of a checkpoint are pruned, how far, and to which sparsity type."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.caller_warnings import warn
from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.optimizer_state import find_optimizer_state
from jaxpruner.plan import type_words
from jaxpruner.sparsity_types import PartialGroupError
from jaxpruner.tree import nearest

# Floats of 8 bits come with scales that stand in other tensors.
PRUNABLE = (
    np.dtype('float16'),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype('float32'),
    np.dtype('float64'),
)

_DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}

# Names of layers. A file holds no model that would show what is looked up.
_EMBEDDING = re.compile(
    r'(?!.*proj).*embed.*|(.*_)?(emb|wte|wpe)(_(?!proj).*)?|shared|relative_.*bias|(cls|class|mask)_token'
)
_HEAD = re.compile(r'lm_head|output_head|(un|de)embed.*|embed_out|logits.*')
# That mean a head only as the whole name.
_HEAD_PATHS = ('output', 'output_layer', 'output_projection', 'cls/predictions/decoder')
_PARAMETERS = ('weight', 'kernel', 'w')
LOOKS_LIKE_EMBEDDING = 'looks like an embedding'
LOOKS_LIKE_HEAD = 'looks like an output head'


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
    types: Sequence[tuple[str | None, str]] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> dict[str, Choice]:
    """Decides what happens to each leaf that is pruned.

    By default the leaves are pruned that have floats of 16 to 64 bits and more than one dimension, and that belong to
    no optimizer. What looks like an embedding or an output head by its name and rank stays dense, unless a glob of
    `only` or `types` names it. `only` and `skip` choose among these by globs. A leaf whose full name stands in `only`
    is pruned whatever its rank. `left_out` says which leaves stay as they are, and why.

    Args:
      leaves: all tensors of the checkpoint.
      sparsity: share to remove, in [0, 1]; not needed where all types are N:M.
      distribution: `'uniform'`, the same for each leaf, or `'erk'`.
      types: globs and config strings of sparsity types, or `'dense'`. The first match wins. A leaf without a match has
        the type that is given with `None` in place of a glob, and is unstructured if there is none.
      only: globs of the leaves to prune; all that can be by default.
      skip: globs of leaves to leave as they are.

    Returns:
      The pruned leaves by name, in the order of `leaves`.

    Raises:
      ValueError: a setting is wrong, a name matches nothing, a type does not fit a shape, a leaf named in full has no
        floats that can be pruned, or nothing is chosen.

    >>> leaves = {'a': Leaf((4, 4), np.dtype('float32')), 'b': Leaf((4,), np.dtype('float32'))}
    >>> choose(leaves, 0.5, types=[('*', '2:4')])
    {'a': Choice(sparsity=0.5, kind=NByM(n=2, m=4, axis=-1, allow_partial=False))}
    """
    if distribution not in _DISTRIBUTIONS:
        raise ValueError(
            f'distribution: {distribution!r} is unknown; {nearest(distribution, _DISTRIBUTIONS)}'
        )
    if sparsity is not None:
        sparsity_distributions.check_sparsity(sparsity, 'sparsity')
    reasons = left_out(leaves, types, only, skip)
    pruned_types: dict[str, sparsity_types.SparsityType] = {}
    refused = {}
    for name, sparsity_type in _types_by_name(leaves, types).items():
        if name not in reasons and sparsity_type is not None:
            pruned_types[name] = sparsity_type
            try:
                sparsity_type.check_shape(leaves[name].shape, name)
            except PartialGroupError as error:
                refused[name], _, _ = str(error).partition('; ')
    if refused:
        raise ValueError(
            f'{"; ".join(refused.values())}. Choose another m or axis for such tensors, or leave them dense: '
            f'skip={[*skip, *refused]}'
        )
    if not pruned_types:
        raise ValueError(
            'no leaf is left to prune; a leaf needs floats of 16 to 64 bits, and more than one dimension or its full '
            'name in only; what looks like an embedding or an output head needs a glob in only or types'
        )
    if sparsity is None:
        shares = {name: _own_share(name, pruned_types[name]) for name in pruned_types}
    else:
        _warn_of_own_shares(pruned_types.values(), sparsity)
        # Without the leaves that stay dense, so that the budget is that of the others.
        shapes = {
            name: jax.ShapeDtypeStruct(leaves[name].shape, np.float32) for name in pruned_types
        }
        distribute = _DISTRIBUTIONS[distribution]
        shares = distribute(shapes, sparsity, filter_fn=lambda path, leaf: True)
    return {name: Choice(float(shares[name]), pruned_types[name]) for name in pruned_types}


def left_out(
    leaves: Mapping[str, Leaf],
    types: Sequence[tuple[str | None, str]] = (),
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
      A few words for each such leaf, by name, in the order of `leaves`.

    Raises:
      ValueError: as `choose`.

    >>> leaf = Leaf((4, 4), np.dtype('float32'))
    >>> left_out({'kernel': leaf, 'opt_state/0/nu/kernel': leaf, 'bias': Leaf((4,), leaf.dtype)})
    {'opt_state/0/nu/kernel': "optimizer's state (nu)", 'bias': 'one dimension or none'}
    """
    paths = [(name,) for name in leaves]
    tree_lib.check_names(only, paths, 'only')
    tree_lib.check_names(skip, paths, 'skip')
    _check_prunable(only, leaves, 'only')
    optimizer_state = find_optimizer_state(leaves)
    types_by_name = _types_by_name(leaves, types)
    named = [*only, *(glob for glob, _ in types if glob is not None)]

    def reason(name: str, leaf: Leaf) -> str | None:
        if _matches_any(skip, name):
            return 'named in skip'
        if name in optimizer_state and name not in only:
            field = optimizer_state[name].field
            return f"optimizer's state ({field})" if field else "optimizer's state"
        if leaf.dtype not in PRUNABLE:
            return f'{leaf.dtype.name}, which is not pruned'
        if types_by_name[name] is None:
            return 'of type dense'
        if name in only:
            return None
        if leaf.ndim < 2:
            return 'one dimension or none'
        if only and not _matches_any(only, name):
            return 'not named in only'
        return None if _matches_any(named, name) else _looks_like(name, leaf.ndim)

    reasons = {}
    for name, leaf in leaves.items():
        words = reason(name, leaf)
        if words is not None:
            reasons[name] = words
    return reasons


def _looks_like(name: str, rank: int) -> str | None:
    """Tells by its name and rank that a leaf is an embedding or an output head.

    A table has at most three axes, and no layer of a `kernel` is one: patches of images are embedded by convolutions.
    """
    parts = re.split('[./]', name.lower().removesuffix('/value'))
    is_kernel = parts[-1] == 'kernel'
    if parts[-1] in _PARAMETERS:
        parts = parts[:-1]
    layer = '/'.join(parts[-1:])
    if parts[:1] in (['params'], ['model']):
        parts = parts[1:]
    if _HEAD.fullmatch(layer) or '/'.join(parts) in _HEAD_PATHS:
        return LOOKS_LIKE_HEAD
    if _EMBEDDING.fullmatch(layer) and rank <= 3 and not is_kernel:
        return LOOKS_LIKE_EMBEDDING
    return None


def _own_share(name: str, sparsity_type: sparsity_types.SparsityType) -> float:
    """Computes the share that an N:M type removes; other types have none."""
    if not isinstance(sparsity_type, sparsity_types.NByM):
        raise ValueError(
            f'sparsity: {name} needs one, since its type is {type_words(sparsity_type)}; only N:M types need none'
        )
    return 1 - sparsity_type.n / sparsity_type.m


def _warn_of_own_shares(types: Iterable[sparsity_types.SparsityType], sparsity: float) -> None:
    """Warns if no leaf gets the sparsity that was asked for, since all have N:M types of another one."""
    shares = []
    for sparsity_type in types:
        if not isinstance(sparsity_type, sparsity_types.NByM):
            return
        share = 1 - sparsity_type.n / sparsity_type.m
        if not sparsity or math.isclose(share, sparsity):
            return
        shares.append(f'{sparsity_type.n}:{sparsity_type.m} removes {share:.4g}')
    warn(
        f'sparsity {sparsity} has no effect: all leaves are pruned to N:M, which removes a share of its own '
        f'({", ".join(dict.fromkeys(shares))}); leave it out'
    )


def _check_prunable(names: Iterable[str], leaves: Mapping[str, Leaf], setting: str) -> None:
    """Refuses leaves, named in full, that have no floats to prune."""
    for name in names:
        if name in leaves and leaves[name].dtype not in PRUNABLE:
            prunable = ', '.join([dtype.name for dtype in PRUNABLE])
            raise ValueError(
                f'{setting}: {name} is {leaves[name].dtype}, which is not pruned; {prunable} are'
            )


def _matches_any(globs: Iterable[str], name: str) -> bool:
    return any(tree_lib.matches(glob, (name,)) for glob in globs)


def _types_by_name(
    leaves: Mapping[str, Leaf], types: Sequence[tuple[str | None, str]]
) -> dict[str, sparsity_types.SparsityType | None]:
    """Maps each leaf to its sparsity type, `None` where it stays dense."""
    types_by_glob: dict[str | None, sparsity_types.SparsityType | None] = {}
    for glob, text in types:
        is_dense = text == 'dense'
        sparsity_type = None if is_dense else sparsity_types.parse_sparsity_type(text)
        if glob in types_by_glob:
            what = f'a type for all others ({text})' if glob is None else repr(glob)
            raise ValueError(f'types: {what} is given twice; only the first would count')
        types_by_glob[glob] = sparsity_type
        if glob is not None and not is_dense:
            _check_prunable([glob], leaves, 'types')
    others = types_by_glob.pop(None, sparsity_types.Unstructured())
    rules = tree_lib.first_matches(types_by_glob, [(name,) for name in leaves], 'types')
    in_order = list(types_by_glob.values())
    types_by_name = {}
    for name, rule in zip(leaves, rules, strict=True):
        types_by_name[name] = others if rule is None else in_order[rule]
    return types_by_name
