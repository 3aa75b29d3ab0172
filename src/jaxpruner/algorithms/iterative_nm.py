"""N:M sparsity reached step by step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, mask_calculator, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners


@dataclasses.dataclass
class IterativeNMPruning(base_updater.BaseUpdater):
    """Keeps M of M, then M-1, ... then N: the decaying mask of Kao et al., "Training recipe for N:M sparsity", 2022.

    Of the M - N weights to remove in each group, the share removed at a step is the scheduled sparsity over its target,
    rounded. With a schedule that stays at its target it is N:M at once.

    Raises:
      ValueError: a sparsity type other than N:M, or a `topk_fn`.

    >>> updater = IterativeNMPruning(sparsity_type='1:4')
    >>> [int(updater.kept_per_group(updater.sparsity_type, progress)) for progress in (0.0, 0.4, 1.0)]
    [4, 3, 1]
    """

    sparsity_type: Any = sparsity_types.NByM(2, 4)

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.sparsity_type, sparsity_types.SparsityType):
            _check_n_by_m(self.sparsity_type)
        if self.topk_fn is not None:
            raise ValueError('IterativeNMPruning selects N of M itself: topk_fn has no meaning for it')

    def kept_per_group(self, sparsity_type: sparsity_types.NByM, progress: Any) -> jax.Array:
        """How many weights of a group are kept when a share `progress` of the way is done: int32 scalar."""
        removed = jnp.round((sparsity_type.m - sparsity_type.n) * jnp.clip(progress, 0.0, 1.0))
        return sparsity_type.m - removed.astype(jnp.int32)

    def get_target_sparsities(self, params):
        """As the base's; refuses leaves whose type is not N:M."""
        targets = super().get_target_sparsities(params)
        for path, leaf_type in self._pruned_types(params, targets):
            _check_n_by_m(leaf_type, f'{tree_lib.path_string(path)}: ')
        return targets

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """The magnitudes."""
        del sparse_state, grads
        return pruners.magnitudes(params)

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Masks with as many weights in each group as the schedule has reached."""
        targets = sparse_state.target_sparsities
        sparsities = self.scheduler.get_sparsity_at_step(targets, sparse_state.count)
        scores = self.scores_now(params, sparse_state, grads, extra_args)
        paths, leaves, treedef = tree_lib.flatten_with_paths(scores, keep_none=True)
        entries = zip(
            paths,
            leaves,
            self._leaf_types(paths, leaves),
            tree_lib.leaves_like(treedef, targets),
            tree_lib.leaves_like(treedef, sparsities),
            strict=True,
        )
        masks = [
            None if target is None else self._mask(path, leaf, leaf_type, sparsity / jnp.where(target > 0, target, 1))
            for path, leaf, leaf_type, target, sparsity in entries
        ]
        return sparse_state._replace(masks=jax.tree.unflatten(treedef, masks))

    def _mask(self, path, scores, leaf_type, progress):
        kept = self.kept_per_group(leaf_type, progress)

        def select(layer):
            return mask_calculator.n_by_m_mask(layer, kept, leaf_type.m, leaf_type.axis)

        return self._per_layer(path, select)(scores)


def _check_n_by_m(sparsity_type: Any, where: str = '') -> None:
    if not isinstance(sparsity_type, sparsity_types.NByM):
        raise ValueError(
            f"{where}iterative_nm reaches N:M sparsity step by step, so it needs NByM, got {sparsity_type}; write '2:4'"
        )
