"""Pruners that calibrate a model on some batches, then prune it once: Wanda, RIA, SparseGPT."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxpruner import api
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import matrix_masks, ria, sparsegpt, wanda
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning


@dataclasses.dataclass
class Wanda(CalibratedPruning):
    """Removes the weights of least magnitude times norm of their input. Sun et al., 2023.

    >>> pruner = Wanda(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> params = {'w': jnp.array([[1.0], [2.0]])}
    >>> batches = [jnp.array([[9.0, 1.0], [9.0, 1.0]])]  # the first input is the larger
    >>> pruner.instant_sparsify(params, apply_fn=lambda params, x: x @ params['w'], batches=batches)[1]['w'].tolist()
    [[1], [0]]
    """

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """The mask; weights that are kept do not change."""
        del where
        scores = wanda.wanda_scores(weights, statistics.second_moment)
        return None, matrix_masks.keep_in_matrices(scores, sparsity, sparsity_type, self.per)


@dataclasses.dataclass
class RIA(CalibratedPruning):
    """Removes the weights of least relative importance and activation. Zhang et al., 2024.

    Attributes:
      power: of the norm of the inputs.

    >>> RIA().per
    'layer'
    """

    per: str = 'layer'
    power: float = 0.5

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """The mask; weights that are kept do not change."""
        del where
        scores = ria.ria_scores(weights, statistics.second_moment, self.power)
        return None, matrix_masks.keep_in_matrices(scores, sparsity, sparsity_type, self.per)


@dataclasses.dataclass
class SparseGPT(CalibratedPruning):
    """Removes weights input by input and changes the others to make up for it. Frantar and Alistarh, 2023.

    Attributes:
      damping: what is added to a Gram matrix's diagonal, as a share of its mean; ten times as much where that is not
        enough, with a warning.

    Raises:
      ValueError: a setting is wrong.

    >>> pruner = SparseGPT(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> batches = [jnp.array([[1.0, 1.0], [2.0, 2.0], [1.0, 0.9]])]  # one input can stand for both
    >>> params = {'w': jnp.ones((2, 1))}
    >>> pruned, _ = pruner.instant_sparsify(params, apply_fn=lambda params, x: x @ params['w'], batches=batches)
    >>> pruned['w'].round(1).tolist()
    [[0.0], [2.0]]
    """

    kind: ClassVar[str] = 'gram'

    per: str = 'layer'
    damping: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        if not self.damping >= 0:
            raise ValueError(f'damping must not be negative, got {self.damping!r}')

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """New weights and the mask."""
        pruned = sparsegpt.prune_by_sparsegpt(
            weights, statistics.gram, sparsity, sparsity_type, self.per, jnp.float32(self.damping)
        )
        most = float(jnp.max(pruned.damping, initial=0))
        if most > self.damping * 1.001:
            warnings.warn(
                f'{where}: its Gram matrix could not be decomposed with damping {self.damping}, and {most:.2g} was '
                'used; calibrate with more samples, or set damping',
                UserWarning,
                stacklevel=4,
            )
        return pruned.weights, pruned.mask


def prune(
    params: tree_lib.PyTree,
    sparsity: float,
    algorithm: str = 'magnitude',
    *,
    apply_fn: Callable[..., Any] | None = None,
    batches: Iterable[Any] | None = None,
    **settings: Any,
) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
    """Prunes a trained model in one call.

    Args:
      params: any pytree of arrays.
      sparsity: share of weights to remove, in [0, 1].
      algorithm: a name that `create_updater_from_config` knows.
      apply_fn: `(params, *inputs) -> results`, the model; for algorithms that calibrate (wanda, ria, sparsegpt).
      batches: any iterable of its inputs; for the same.
      **settings: further keys of a configuration, such as `sparsity_type='2:4'`.

    Returns:
      The pruned parameters, and the masks, `None` where dense.

    Raises:
      ValueError: a wrong setting; the message says which.

    >>> prune({'w': jnp.array([[1.0, 2.0]])}, 0.5)[0]['w'].tolist()
    [[0.0, 2.0]]
    """
    updater = api.create_updater_from_config({'algorithm': algorithm, 'sparsity': sparsity, **settings})
    if isinstance(updater, CalibratedPruning):
        return updater.instant_sparsify(params, apply_fn=apply_fn, batches=batches)
    return updater.instant_sparsify(params)


for _name, _pruner in {'wanda': Wanda, 'ria': RIA, 'sparsegpt': SparseGPT}.items():
    api.register_one_shot_algorithm(_name, _pruner)
