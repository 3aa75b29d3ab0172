"""Maps over pytrees in which a leaf may be `None`, and paths of leaves, for algorithms of one's own.

>>> from jaxpruner import tree
>>> tree.map_with_missing(lambda p, m: p if m is None else p * m, {'a': 3, 'b': 4}, {'a': None, 'b': 0})
{'a': 3, 'b': 0}
"""

from jaxpruner.core.tree import *  # noqa: F403
