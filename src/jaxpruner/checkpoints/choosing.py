"""Which leaves of a checkpoint are pruned, how far, and to which sparsity type."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.checkpoints.reading import Leaf

# Floats of 8 bits come with scales that stand in other tensors.
_PRUNABLE = ('float16', 'bfloat16', 'float32', 'float64')
OPTIMIZER_STATE = "optimizer's state"

# Names of layers. A file holds no model that would show what is looked up.
_EMBEDDING = re.compile(
    r'(?!.*proj).*embed.*|(.*_)?(emb|wte|wpe)(_(?!proj).*)?|shared|relative_.*bias|(cls|class|mask)_token'
)
_HEAD = re.compile(r'lm_head|output_head|(un|de)embed.*|embed_out|logits.*')
# That mean a head only as the whole name.
_HEAD_PATHS = ('output', 'output_layer', 'output_projection', 'cls/predictions/decoder')

# Names above an optimizer's state; Keras calls its own `optimizer_variables`.
_OPTIMIZER = re.compile(r'.*optimizer.*|opt(im)?(_.*)?')
# Fields of optax's states whose values have the shapes of the weights.
_MOMENTS = frozenset('mu nu nu_max trace ema acc_grads z'.split())


class Choice(NamedTuple):
    """How a leaf is pruned.

    >>> Choice(0.5, sparsity_types.Unstructured()).sparsity
    0.5
    """

    sparsity: float  # share to remove; N:M removes its own, unless this is 0
    kind: sparsity_types.SparsityType


def choose(
    leaves: Mapping[str, Leaf],
    sparsity: float | None = None,
    types: Sequence[tuple[str | None, str]] = (),
) -> dict[str, Choice | str]:
    """Decides what happens to each leaf.

    By default the leaves are pruned that have floats of 16 to 64 bits and more than one dimension, and that belong to
    no optimizer. What looks like an embedding, a bias, a norm or an output head by its name and rank stays dense,
    unless a glob of `types` names it. A leaf whose full name stands in `types` is pruned whatever its rank.

    Args:
      leaves: all tensors of the checkpoint.
      sparsity: share to remove, in [0, 1]; not needed where all types are N:M.
      types: globs and config strings of sparsity types, or `'dense'`. The first match wins. A leaf without a match has
        the type that is given with `None` in place of a glob, and is unstructured if there is none.

    Returns:
      By name, in the order of `leaves`: a `Choice`, or why the leaf stays as it is.

    Raises:
      ValueError: a setting is wrong, a name matches nothing, a type does not fit a shape, a leaf named in full has no
        floats that can be pruned, or nothing is chosen.

    >>> import numpy as np
    >>> leaves = {'a': Leaf((4, 4), np.dtype('float32')), 'b': Leaf((4,), np.dtype('float32'))}
    >>> choose(leaves, 0.5)
    {'a': Choice(sparsity=0.5, kind=Unstructured()), 'b': 'one dimension or none'}
    """
    if sparsity is not None:
        sparsity_distributions.check_sparsity(sparsity, 'sparsity')
    rules = {
        glob: None if text == 'dense' else sparsity_types.parse_sparsity_type(text)
        for glob, text in types
    }
    if len(rules) < len(types):
        raise ValueError(f'types: a name is given twice in {list(types)}; name each once')
    others = rules.pop(None, sparsity_types.Unstructured())
    named = tree_lib.values_by_leaf(rules, [(name,) for name in leaves], 'types')
    optimizer_state = _optimizer_state(leaves)
    choices: dict[str, Choice | str] = {}
    for i, (name, leaf) in enumerate(leaves.items()):
        kind = named.get(i, others)
        is_named = name in rules
        if kind is None:
            choices[name] = 'of type dense'
        elif leaf.dtype.name not in _PRUNABLE:
            choices[name] = f'{leaf.dtype.name}, which is not pruned'
            if is_named:
                raise ValueError(f'types: {name} is {choices[name]}; {", ".join(_PRUNABLE)} are')
        elif name in optimizer_state and not is_named:
            choices[name] = OPTIMIZER_STATE
        elif leaf.ndim < 2 and not is_named:
            choices[name] = 'one dimension or none'
        elif i not in named and (words := _looks_like(name, leaf.ndim)):
            choices[name] = words
        else:
            check = functools.partial(kind.check_shape, leaf.shape, name)
            sparsity_types.check_each({(name,): check})
            share = sparsity
            if share is None and isinstance(kind, sparsity_types.NByM):
                share = 1 - kind.n / kind.m
            if share is None:
                raise ValueError(f'sparsity: {name} needs one; only N:M types need none')
            choices[name] = Choice(share, kind)
    if all(isinstance(choice, str) for choice in choices.values()):
        raise ValueError(
            'no leaf is left to prune; a leaf needs floats of 16 to 64 bits, and more than one dimension or its full '
            'name in types; what looks like an embedding or an output head needs a glob there'
        )
    return choices


def _looks_like(name: str, rank: int) -> str | None:
    """Tells by its name and rank that a leaf is an embedding, a bias, a norm or an output head.

    A table has at most three axes, and no layer of a `kernel` is one: patches of images are embedded by convolutions.
    """
    parts = re.split('[./]', name.lower().removesuffix('/value'))
    if parts[-1] in sparsity_distributions.VECTOR_NAMES - {'b'}:  # which is a kernel in LoRA
        return 'looks like a bias or norm'
    is_kernel = parts[-1] == 'kernel'
    if parts[-1] in ('weight', 'kernel', 'w'):
        parts = parts[:-1]
    layer = '/'.join(parts[-1:])
    if parts[:1] in (['params'], ['model']):
        parts = parts[1:]
    if _HEAD.fullmatch(layer) or '/'.join(parts) in _HEAD_PATHS:
        return 'looks like an output head'
    if _EMBEDDING.fullmatch(layer) and rank <= 3 and not is_kernel:
        return 'looks like an embedding'
    return None


def _optimizer_state(names: Iterable[str]) -> set[str]:
    """Finds the tensors that are an optimizer's, by their names: a checkpoint does not say so.

    They lie below `opt_state`, `optimizer` or a similar name; or below `mu` and the like, beside which stands `count`.
    """
    paths = {name: tuple(re.split('[/.]', name)) for name in names}
    counted = {path[:-1] for path in paths.values() if path[-1] == 'count'}
    found = set()
    for name, path in paths.items():
        for position, part in enumerate(path):
            is_moment = part in _MOMENTS and path[:position] in counted
            if is_moment or _OPTIMIZER.fullmatch(part):
                found.add(name)
    return found
