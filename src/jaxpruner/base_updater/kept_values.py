"""What a step may return of an algorithm's own values: a memory of the same structure, shapes and dtypes.

A memory that changes its dtype compiles the step of a Python loop once more, is refused by `scan`, and is cast in
silence when a checkpoint is restored into the shapes of `init`. These checks read shapes alone, while a step is traced:
a compiled step pays nothing for them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.sparse_state import SparseState

_MOST_NAMED = 3


def check_tracked(updater: Any, state: SparseState, returned: Any) -> tuple[SparseState, Any]:
    """Returns what `track` returned; refuses anything but a state and what it tracked."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], SparseState):
        raise TypeError(
            f'{type(updater).__name__}.track must return two values, the SparseState and what update_state gets as '
            f'its argument tracked, got {_kind(returned)}; write `return sparse_state._replace(…), None`'
        )
    new_state, tracked = returned
    check_memory(updater, 'track', state, new_state)
    return new_state, tracked


def check_memory(updater: Any, method: str, old: SparseState, new: SparseState) -> None:
    """Refuses a method that changes the structure, shapes or dtypes of `algorithm_state`."""
    before, after = old.algorithm_state, new.algorithm_state
    if before is after or _described(before) == _described(after):
        return
    differences = [
        f'{name} was {before_leaf} and is {after_leaf}'
        for name, before_leaf, after_leaf in _differences(_by_name(before), _by_name(after))
    ]
    if differences:  # else containers differ in kind alone, as boxes of Flax NNX do
        named = '; '.join(differences[:_MOST_NAMED])
        raise TypeError(
            f'{type(updater).__name__}.{method} changes the structure, shapes or dtypes of algorithm_state: '
            f'{named}. They must stay from step to step: make each leaf in '
            'init_algorithm_state as it is computed later, such as jnp.zeros_like(param, dtype=jnp.float32)'
        )


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list) and not hasattr(value, '_fields'):
        return f'a {type(value).__name__} of {len(value)}'
    return f'one {type(value).__name__}'


def _described(memory: tree_lib.PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(memory)
    return treedef, [_leaf_words(leaf) for leaf in leaves]


def _by_name(memory: tree_lib.PyTree) -> dict[str, str]:
    paths, leaves, _ = tree_lib.flatten_with_paths({'algorithm_state': memory})
    return {
        tree_lib.path_string(path): _leaf_words(leaf)
        for path, leaf in zip(paths, leaves, strict=True)
    }


def _differences(before: dict[str, str], after: dict[str, str]) -> list[tuple[str, str, str]]:
    names = [*before, *(name for name in after if name not in before)]
    compared = [(name, before.get(name, 'missing'), after.get(name, 'missing')) for name in names]
    return [entry for entry in compared if entry[1] != entry[2]]


def _leaf_words(leaf: Any) -> str:
    """The dtype and shape, such as `float32[64,128]`; weak types do not count."""
    dtype = getattr(leaf, 'dtype', None)
    if dtype is None:
        dtype = jnp.result_type(leaf)
    return f'{dtype}[{",".join(map(str, jnp.shape(leaf)))}]'
