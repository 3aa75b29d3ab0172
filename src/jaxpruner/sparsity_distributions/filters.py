"""Which leaves a distribution selects."""

from collections.abc import Callable
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.core import vector_warnings

FilterFn = Callable[[tree_lib.Path, Any], bool]
FilterFnType = FilterFn  # its name in JaxPruner


def NOT_DIM_ONE_FILTER(key: tree_lib.Path, param: Any) -> bool:
    """Selects the leaves with more than one dimension: kernels, not biases and norms.

    Args:
      key: the leaf's path.
      param: the leaf.

    >>> import numpy as np
    >>> NOT_DIM_ONE_FILTER(('dense', 'bias'), np.ones(3))
    False
    """
    del key
    return getattr(param, 'ndim', 0) > 1  # a number of Python has none


NOT_DIM_ONE_FILTER_FN = NOT_DIM_ONE_FILTER  # its name in JaxPruner


def KERNEL_FILTER_FN(key: tree_lib.Path, param: Any) -> bool:
    """Selects the leaves whose last name is `kernel`.

    Args:
      key: the leaf's path.
      param: the leaf.

    >>> KERNEL_FILTER_FN(('dense', 'kernel'), None)
    True
    """
    del param
    return key[-1] == 'kernel'


def NOT_BIAS_FILTER(path: tree_lib.Path, param: Any) -> bool:
    """Selects the leaves with more than one dimension whose name is not that of a bias or norm.

    The biases of attention layers have two dimensions in some libraries, heads and their width.

    >>> import numpy as np
    >>> NOT_BIAS_FILTER(('query', 'bias'), np.ones((8, 64))), NOT_BIAS_FILTER(('query', 'kernel'), np.ones((8, 64)))
    (False, True)
    """
    return NOT_DIM_ONE_FILTER(path, param) and path[-1] not in vector_warnings.VECTOR_NAMES
