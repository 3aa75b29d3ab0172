"""Which leaves a strategy means: kernels unless it names layers, and what a layer's name stands for."""

import fnmatch
import re
from typing import Any

from jaxpruner import tree as tree_lib

SEPARATOR = '-'
# `kernel` in Flax and Keras, `weight` in Equinox, `w` in Haiku; also w1, w_in, weight_hh, depthwise_kernel.
_KERNEL = re.compile(r'(?:.*_)?(?:kernel|weights?|w)(?:\d+|_.*)?')
# Vectors of a layer, which stacking makes matrices; also kernel_scale, weight_g.
_VECTOR = re.compile(r'(?:.*_)?(?:b|bias|scale|offset|beta|gamma|g|mean|var)\d*')
# In Equinox norms and tables of embeddings have a `weight`, too, and norms may have more than one dimension.
_NORM_LAYER = re.compile(r'.*norm.*|(?:.*_)?ln(?:\d+|_.*)?')
_TABLE_LAYER = re.compile(r'.*embed.*|(?:.*_)?(?:emb|wte|wpe)(?:\d+|_.*)?')


def is_kernel(path: tree_lib.Path, leaf: Any) -> bool:
    """Whether a leaf (or its shape and dtype) is a kernel: floats of at least two dimensions with a kernel's name.

    The last name tells: `kernel` in Flax and Keras, `weight` in Equinox, `w` in Haiku, with what may follow (`w1`,
    `weight_hh`). The `weight` of a layer that is called norm or embedding is no kernel. Leaves in lists and tuples have
    no name of their own: they are kernels unless they lie under the name of a bias, norm or embedding.

    >>> import numpy as np
    >>> [is_kernel((layer, name), np.ones((2, 2))) for layer, name in [('a', 'kernel'), ('a', 'bias'), ('norm', 'w')]]
    [True, False, False]
    """
    if leaf.ndim < 2 or not tree_lib.holds_weights(leaf):
        return False
    names = [name.lower() for name in path if not name.isdecimal()]
    if not names:
        return True
    layer, name = ['', *names][-2:]
    if _VECTOR.fullmatch(name):
        return False
    if not _KERNEL.fullmatch(name):
        is_unnamed = path[-1].isdecimal()
        return is_unnamed and not (_NORM_LAYER.fullmatch(name) or _TABLE_LAYER.fullmatch(name))
    if 'kernel' in name:
        return True
    is_table = _TABLE_LAYER.fullmatch(layer) and name.startswith('weight') and leaf.ndim == 2
    return not (_NORM_LAYER.fullmatch(layer) or is_table)


def names_leaf(name: str | tree_lib.Path, path: tree_lib.Path) -> bool:
    """Whether a name in a strategy means the leaf at `path`.

    It is a leaf, `'Dense_0-kernel'`; a layer with all of its leaves, `'Dense_0'`; or a glob, `'Dense_*-kernel'`. What
    the core takes as a name (a tuple, `'a/b/kernel'`) is understood as well.

    >>> [names_leaf(name, ('Dense_0', 'kernel')) for name in ('Dense_0-kernel', 'Dense_0', '*-kernel', 'Dense')]
    [True, True, True, False]
    """
    if tree_lib.matches(name, path):
        return True
    if not isinstance(name, str):
        return False
    layers = [SEPARATOR.join(path[:length]) for length in range(1, len(path) + 1)]
    return name in layers or fnmatch.fnmatchcase(layers[-1], name)
