"""What an algorithm may override and most do not: hooks that do nothing unless a class defines them."""

from typing import Any

import optax

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparse_state import SparseState


class OptionalHooks:
    """The part of `BaseUpdater` that does nothing by default.

    >>> OptionalHooks().init_algorithm_state({'w': None}, {'w': None}) is None
    True
    """

    def init_algorithm_state(self, params: tree_lib.PyTree, target_sparsities: tree_lib.PyTree) -> tree_lib.PyTree:
        """The first values of what the algorithm itself keeps from step to step; by default nothing.

        They stand in `sparse_state.algorithm_state`. `track` replaces them each step, `calculate_scores` reads them.

        Args:
          params: the parameters.
          target_sparsities: a tree like them, `None` where dense.

        Returns:
          Any pytree of arrays, whose structure, shapes and dtypes stay; `None` for nothing.
        """
        del params, target_sparsities
        return None

    def pre_forward_update(
        self, params: tree_lib.PyTree, opt_state: Any = None, *, sparse_state: Any = None
    ) -> tree_lib.PyTree:
        """The parameters that the forward pass uses; straight-through methods prune here. Default: as they are.

        Args:
          params: the parameters.
          opt_state: a `SparseState`, or any optimizer state that holds one; its masks are as stored.
          sparse_state: another name of `opt_state`.
        """
        del opt_state, sparse_state
        return params

    def track(self, sparse_state: SparseState, params: tree_lib.PyTree) -> tuple[SparseState, Any]:
        """What `update` computes in every step, besides masks that are due; by default nothing.

        An override that names `grads` receives the gradients as `update` got them. Further named arguments receive the
        extra arguments of `update`.

        Args:
          sparse_state: the state, masks as they are stored.
          params: the parameters.

        Returns:
          The state, and what `update_state` gets as its argument `tracked` where the host has said that masks are due,
          `None` for nothing.
        """
        del params
        return sparse_state, None

    def moments_to_reset(self, old_state: SparseState, new_state: SparseState) -> tree_lib.PyTree | None:
        """The weights whose moments in the optimizer become zero after a mask update.

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
