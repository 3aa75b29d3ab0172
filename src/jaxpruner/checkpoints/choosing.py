"""Which leaves of a checkpoint are pruned, how far, and to which sparsity type."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.caller_warnings import warn
from jaxpruner.checkpoints.optimizer_state import find_optimizer_state
from jaxpruner.checkpoints.reading import Leaf
from jaxpruner.plan import type_words
from jaxpruner.tree import nearest

# Floats of 8 bits come with scales that stand in other tensors.
_PRUNABLE = ('float16', 'bfloat16', 'float32', 'float64')
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
    by_name = _types_by_name(leaves, types)
    pruned_types: dict[str, Any] = {name: by_name[name] for name in leaves if name not in reasons}
    if not pruned_types:
        raise ValueError(
            'no leaf is left to prune; a leaf needs floats of 16 to 64 bits, and more than one dimension or its full '
            'name in only; what looks like an embedding or an output head needs a glob in only or types'
        )
    refused = {}
    for name, sparsity_type in pruned_types.items():
        try:
            sparsity_type.check_shape(leaves[name].shape, name)
        except sparsity_types.PartialGroupError as error:
            refused[name], _, _ = str(error).partition('; ')
    if refused:
        raise ValueError(
            f'{"; ".join(refused.values())}. Choose another m or axis for such tensors, or leave them dense: '
            f'skip={[*skip, *refused]}'
        )
    # An N:M type removes a share of its own, whatever the sparsity is.
    shares: Mapping[str, Any] = {
        name: 1 - each.n / each.m
        for name, each in pruned_types.items()
        if isinstance(each, sparsity_types.NByM)
    }
    others = [name for name in pruned_types if name not in shares]
    if sparsity is None:
        if others:
            raise ValueError(
                f'sparsity: {others[0]} needs one, since its type is {type_words(pruned_types[others[0]])}; only N:M '
                'types need none'
            )
    else:
        if (
            sparsity
            and not others
            and not any(math.isclose(own, sparsity) for own in shares.values())
        ):
            name, own = next(iter(shares.items()))
            warn(
                f'sparsity {sparsity} has no effect: all leaves are pruned to N:M, which removes a share of its own '
                f'({type_words(pruned_types[name])} removes {own:.4g}); leave it out'
            )
        # Without the leaves that stay dense, so that the budget is that of the others.
        shapes = {
            name: jax.ShapeDtypeStruct(leaves[name].shape, np.float32) for name in pruned_types
        }
        shares = _DISTRIBUTIONS[distribution](shapes, sparsity, filter_fn=lambda path, leaf: True)
    return {name: Choice(float(shares[name]), kind) for name, kind in pruned_types.items()}


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
    named = [glob for glob, _ in types if glob is not None]
    pruned_globs = [glob for glob, text in types if glob is not None and text != 'dense']
    for setting, names in (('only', only), ('types', pruned_globs)):
        for name in names:
            if name in leaves and leaves[name].dtype.name not in _PRUNABLE:
                raise ValueError(
                    f'{setting}: {name} is {leaves[name].dtype}, which is not pruned; {", ".join(_PRUNABLE)} are'
                )
    optimizer_state = find_optimizer_state(leaves)
    types_by_name = _types_by_name(leaves, types)
    reasons = {}
    for name, leaf in leaves.items():
        if tree_lib.matches_any(skip, (name,)):
            reasons[name] = 'named in skip'
        elif name in optimizer_state and name not in only:
            field = optimizer_state[name].field
            reasons[name] = f"optimizer's state ({field})" if field else "optimizer's state"
        elif leaf.dtype.name not in _PRUNABLE:
            reasons[name] = f'{leaf.dtype.name}, which is not pruned'
        elif types_by_name[name] is None:
            reasons[name] = 'of type dense'
        elif name in only:
            continue
        elif leaf.ndim < 2:
            reasons[name] = 'one dimension or none'
        elif only and not tree_lib.matches_any(only, (name,)):
            reasons[name] = 'not named in only'
        elif tree_lib.matches_any([*only, *named], (name,)):
            continue
        elif words := _looks_like(name, leaf.ndim):
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


def _types_by_name(
    leaves: Mapping[str, Leaf], types: Sequence[tuple[str | None, str]]
) -> dict[str, sparsity_types.SparsityType | None]:
    """Maps each leaf to its sparsity type, `None` where it stays dense."""
    globs = [glob for glob, _ in types]
    for glob, text in types:
        if globs.count(glob) > 1:
            what = f'a type for all others ({text})' if glob is None else repr(glob)
            raise ValueError(f'types: {what} is given twice; only the first would count')
    types_by_glob = {
        glob: None if text == 'dense' else sparsity_types.parse_sparsity_type(text)
        for glob, text in types
    }
    others = types_by_glob.pop(None, sparsity_types.Unstructured())
    rules = tree_lib.first_matches(types_by_glob, [(name,) for name in leaves], 'types')
    in_order = [*types_by_glob.values(), others]
    return {
        name: in_order[-1 if rule is None else rule]
        for name, rule in zip(leaves, rules, strict=True)
    }
