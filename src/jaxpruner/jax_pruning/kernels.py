"""Which leaves a strategy means: kernels unless it names layers, and what a layer's name stands for."""

import fnmatch
import re
from typing import Any

import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib

# `kernel` in Flax and Keras, `weight` in Equinox, `w` in Haiku; also w1, w_in, weight_hh, depthwise_kernel.
_KERNEL = re.compile(r'(?:.*_)?(?:kernel|weights?|w)(?:\d+|_.*)?')
# Vectors of a layer, which stacking makes matrices; also kernel_scale, weight_g.
_VECTOR = re.compile(r'(?:.*_)?(?:b|bias|scale|offset|beta|gamma|g|mean|var)\d*')
# In Equinox norms and tables of embeddings have a `weight`, too, and norms may have more than one dimension.
_NORM_LAYER = re.compile(r'.*norm.*|(?:.*_)?ln(?:\d+|_.*)?')
_TABLE_LAYER = re.compile(r'.*embed.*|(?:.*_)?(?:emb|wte|wpe)(?:\d+|_.*)?')
SEPARATOR = '-'


def is_kernel(path: tree_lib.Path, leaf: Any) -> bool:
    """Whether a leaf is the kernel of a layer: an array of floats with at least two dimensions and a kernel's name.

    The last name tells: `kernel` in Flax and Keras, `weight` in Equinox, `w` in Haiku, with what may follow (`w1`,
    `weight_hh`). The `weight` of a layer that is called norm or embedding is none. Leaves without a name of their own
    (in lists and tuples) are told by their dimensions, unless they lie under the name of a bias, norm or embedding.

    Args:
      path: the leaf's path.
      leaf: the leaf, or its shape and dtype.

    >>> import numpy as np
    >>> [is_kernel((layer, name), np.ones((2, 2))) for layer, name in [('a', 'kernel'), ('a', 'bias'), ('norm', 'w')]]
    [True, False, False]
    """
    if leaf.ndim < 2 or not is_prunable(leaf):
        return False
    names = [name.lower() for name in path if not name.isdecimal()]
    if not names:
        return True
    if _VECTOR.fullmatch(names[-1]):
        return False
    if path[-1].isdecimal() and not _KERNEL.fullmatch(names[-1]):
        return not (_NORM_LAYER.fullmatch(names[-1]) or _TABLE_LAYER.fullmatch(names[-1]))
    if not _KERNEL.fullmatch(names[-1]):
        return False
    layer = names[-2] if len(names) > 1 else ''
    is_table = _TABLE_LAYER.fullmatch(layer) and names[-1].startswith('weight') and leaf.ndim == 2
    return 'kernel' in names[-1] or not (_NORM_LAYER.fullmatch(layer) or is_table)


def is_prunable(leaf: Any) -> bool:
    """Whether a leaf holds floats, rather than counters or random keys.

    Args:
      leaf: the leaf, or its shape and dtype.

    >>> is_prunable(jnp.ones(2)), is_prunable(jnp.arange(2))
    (True, False)
    """
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def names_leaf(name: str | tree_lib.Path, path: tree_lib.Path) -> bool:
    """Whether a name in a strategy means the leaf at `path`.

    Args:
      name: a leaf, `'Dense_0-kernel'`; a layer with all of its leaves, `'Dense_0'`; or a glob, `'Dense_*-kernel'`. What
        the core takes as a name (a tuple, `'a/b/kernel'`) is understood as well.
      path: the leaf's path.

    >>> [names_leaf(name, ('Dense_0', 'kernel')) for name in ('Dense_0-kernel', 'Dense_0', '*-kernel', 'Dense')]
    [True, True, True, False]
    """
    if tree_lib.matches(name, path):
        return True
    if not isinstance(name, str):
        return False
    layers = [SEPARATOR.join(path[:length]) for length in range(1, len(path) + 1)]
    return name in layers or fnmatch.fnmatchcase(layers[-1], name)
