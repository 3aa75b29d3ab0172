"""What a subclass of SET or RigL overrides is what gets called, under JaxPruner's names and under ours.

JaxPruner's methods had an underscore in front, and subclasses override and call them so. Every class gets both names
for one method, whichever of them it defines, so that `self` and `super()` lead to the same method under both.
"""

import inspect
from typing import Any

_METHODS = ('get_drop_scores', 'get_grow_scores', 'update_masks')
# Methods in which an override may call `calculate_scores` itself.
_MAY_CALL_SCORES = {
    'get_initial_masks',
    'init_algorithm_state',
    'init_state',
    'instant_sparsify',
    'post_gradient_update',
    'pre_forward_update',
    'track',
    'update_state',
    'wrap_optax',
    *_METHODS,
    *(f'_{name}' for name in _METHODS),
}


def unify_names(cls: type, root: type) -> None:
    """Gives a new subclass both names of each method, and refuses what would never be called.

    Raises:
      TypeError: the class defines a method under both names, or `calculate_scores` alone, which `root` never calls.

    >>> import jaxpruner
    >>> class Mine(jaxpruner.SET):
    ...     def _get_drop_scores(self, sparse_state, params, grads):
    ...         return grads
    >>> Mine.get_drop_scores is Mine._get_drop_scores
    True
    """
    for name in _METHODS:
        method = _nearest_definition(cls, name)
        for alias in (name, f'_{name}'):
            if inspect.getattr_static(cls, alias) is not method:
                setattr(cls, alias, method)
    _check_is_called(cls, root)


def _nearest_definition(cls: type, name: str) -> Any:
    """Finds the definition under either name that comes first among the class and its bases."""
    for base in cls.__mro__:
        definitions = [vars(base)[alias] for alias in (name, f'_{name}') if alias in vars(base)]
        if len(definitions) == 2 and definitions[0] is not definitions[1]:
            raise TypeError(
                f'{base.__name__} defines both {name} and _{name}, which are two names of one method; define one of '
                'them, and call a helper by another name'
            )
        if definitions:
            return definitions[0]
    raise AssertionError(name)


def _check_is_called(cls: type, root: type) -> None:
    defined = set()
    for base in cls.__mro__:
        if base is not object and not base.__module__.startswith('jaxpruner.'):
            defined.update(vars(base))
    if 'calculate_scores' in defined and not defined & _MAY_CALL_SCORES:
        raise TypeError(
            f'{cls.__name__} overrides calculate_scores, and no method that could call it: {root.__name__} never does; '
            'override get_drop_scores(sparse_state, params, grads) or get_grow_scores(sparse_state, params, grads), or '
            'derive from BaseUpdater'
        )
