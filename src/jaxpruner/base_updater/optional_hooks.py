"""What an algorithm may override and most do not: hooks that do nothing unless a class defines them.

A hook must return an `algorithm_state` of the same structure, shapes and dtypes. If a dtype changed, a loop in Python
would compile the step a second time, `scan` would refuse it, and restoring a checkpoint into the shapes of `init` would
cast it in silence. The checks read shapes alone, while a step is traced: a compiled step pays nothing for them.
"""

import inspect
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import config_keys
from jaxpruner.core.sparse_state import SparseState

# How many leaves a message names.
_MOST_NAMED = 3
_RENAME = 'if it is a method of your own that means something else, rename it'


def check_track_arguments(pruner: Any, extra_arguments: dict[str, Any]) -> None:
    """Refuses a `track` that needs an argument which `update` was not given; `extra_arguments` are those it takes."""
    try:
        inspect.signature(pruner.track).bind(None, None, **extra_arguments)
    except TypeError as error:
        raise TypeError(
            f'{type(pruner).__name__}.track is called in each step with (sparse_state, params), and with those of '
            f'grads and the extra arguments of update that it names: {error}; give it to update, or, {_RENAME}'
        ) from None


class OptionalHooks:
    """The part of `BaseUpdater` that does nothing by default."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        config_keys.check_constructor_takes(cls, settings)
        return super().__new__(cls)

    def elementwise_score(self) -> Callable[[jax.Array], jax.Array] | None:
        """Returns the function behind `calculate_scores`, if the score of a weight depends on that weight alone.

        Masks are then made from the weights, without calling `calculate_scores`. Unstructured masks of floats of 16
        bits or more take no memory for scores. A subclass that overrides `calculate_scores`, or the making of masks, is
        asked for arrays again.

        Returns:
          A function from an array of weights to scores of its shape and dtype, or `None`. It is hashable, the same
          function each time, and has to round alike wherever it is compiled, as single operations do.
        """
        return None

    def init_algorithm_state(
        self, params: tree_lib.PyTree, target_sparsities: tree_lib.PyTree
    ) -> tree_lib.PyTree:
        """Makes the first values of what the algorithm itself keeps from step to step; by default nothing.

        They stand in `sparse_state.algorithm_state`. `track` replaces them each step, `calculate_scores` reads them.
        Structure, shapes and dtypes must stay from step to step; `update` refuses others. Sums of small numbers vanish
        in 16 bits: use `jnp.zeros_like(param, dtype=jnp.float32)` if parameters may be bfloat16.

        Args:
          params: the parameters.
          target_sparsities: a tree like them, `None` where dense.

        Returns:
          Any pytree of arrays; `None` for nothing.
        """
        del params, target_sparsities
        return None

    def pre_forward_update(
        self, params: tree_lib.PyTree, opt_state: Any = None, *, sparse_state: Any = None
    ) -> tree_lib.PyTree:
        """Returns the parameters that the forward pass uses; straight-through methods prune here. Default: as they are.

        Args:
          params: the parameters.
          opt_state: a `SparseState`, or any optimizer state that holds one; its masks are as stored.
          sparse_state: another name of `opt_state`.
        """
        del opt_state, sparse_state
        return params

    def track(self, sparse_state: SparseState, params: tree_lib.PyTree) -> tuple[SparseState, Any]:
        """Computes what `update` needs in every step, before masks that are due; by default nothing.

        An override may name further arguments, as in `track(self, sparse_state, params, grads)`: `grads` receives the
        gradients as `update` got them, any other name the extra argument of `update`.

        Args:
          sparse_state: the state, masks as they are stored: at one bit a weight if they are packed.
          params: the parameters.

        Returns:
          Two values: the state, and what `update_state` gets as its argument `tracked` if it names it, `None` for
          nothing.

        Raises:
          TypeError: (by `update`) it returned something else, or changed shapes or dtypes of `algorithm_state`.
        """
        del params
        return sparse_state, None

    def moments_to_reset(
        self, old_state: SparseState, new_state: SparseState
    ) -> tree_lib.PyTree | None:
        """Chooses the weights whose moments in the optimizer become zero after a mask update.

        Args:
          old_state: the state before the update, masks unpacked.
          new_state: the state after it.

        Returns:
          A tree of boolean arrays (`None` for none of a leaf), or `None` for none at all.
        """
        del old_state, new_state
        return None

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses a sparsity type with which the algorithm cannot work.

        Args:
          sparsity_type: the type of all leaves, or of one that is to be pruned.
          where: how the message begins: the leaf's path and a colon.
        """
        del sparsity_type, where

    def check_optimizer(self, inner: optax.GradientTransformation, params: tree_lib.PyTree) -> None:
        """Refuses an optimizer with which the algorithm cannot work; called by `init` before anything is computed."""
        del inner, params


def check_tracked(pruner: Any, state: SparseState, returned: Any) -> tuple[SparseState, Any]:
    """Returns what `track` returned; refuses anything but a state and what it tracked."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], SparseState):
        raise TypeError(
            f'{type(pruner).__name__}.track must return two values, the SparseState and what update_state gets as '
            f'its argument tracked, got {_kind(returned)}; write `return sparse_state._replace(…), None`'
        )
    new_state, tracked = returned
    check_algorithm_state(pruner, 'track', state, new_state)
    return new_state, tracked


def check_algorithm_state(pruner: Any, method: str, old: SparseState, new: SparseState) -> None:
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
            f'{type(pruner).__name__}.{method} changes the structure, shapes or dtypes of algorithm_state: '
            f'{named}. They must stay from step to step: make each leaf in '
            'init_algorithm_state as it is computed later, such as jnp.zeros_like(param, dtype=jnp.float32)'
        )


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list) and not hasattr(value, '_fields'):
        return f'a {type(value).__name__} of {len(value)}'
    return f'one {type(value).__name__}'


def _described(algorithm_state: tree_lib.PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(algorithm_state)
    return treedef, [_leaf_words(leaf) for leaf in leaves]


def _by_name(algorithm_state: tree_lib.PyTree) -> dict[str, str]:
    paths, leaves, _ = tree_lib.flatten_with_paths({'algorithm_state': algorithm_state})
    words = {}
    for path, leaf in zip(paths, leaves, strict=True):
        words[tree_lib.path_string(path)] = _leaf_words(leaf)
    return words


def _differences(before: dict[str, str], after: dict[str, str]) -> list[tuple[str, str, str]]:
    names = [*before, *(name for name in after if name not in before)]
    compared = [(name, before.get(name, 'missing'), after.get(name, 'missing')) for name in names]
    return [entry for entry in compared if entry[1] != entry[2]]


def _leaf_words(leaf: Any) -> str:
    """Writes the dtype and shape, such as `float32[64,128]`; weak types do not count."""
    dtype = getattr(leaf, 'dtype', None)
    if dtype is None:
        dtype = jnp.result_type(leaf)
    return f'{dtype}[{",".join(map(str, jnp.shape(leaf)))}]'
