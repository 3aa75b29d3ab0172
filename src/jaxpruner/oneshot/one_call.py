"""Pruning in one call, by name; the names of the one-shot algorithms."""

from collections.abc import Callable, Iterable
from typing import Any

from jaxpruner import api
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.grasp import GraSP
from jaxpruner.oneshot.pruning_at_initialization import PruningAtInitialization
from jaxpruner.oneshot.ria import RIA
from jaxpruner.oneshot.snip import SNIP
from jaxpruner.oneshot.sparsegpt import SparseGPT
from jaxpruner.oneshot.synflow import SynFlow
from jaxpruner.oneshot.wanda import Wanda

_ALGORITHMS = {'wanda': Wanda, 'ria': RIA, 'sparsegpt': SparseGPT, 'snip': SNIP, 'grasp': GraSP, 'synflow': SynFlow}

for _name, _algorithm in _ALGORITHMS.items():
    api.register_one_shot_algorithm(_name, _algorithm)


def prune(
    params: tree_lib.PyTree,
    sparsity: float,
    algorithm: str = 'magnitude',
    *,
    apply_fn: Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batches: Iterable[Any] | None = None,
    progress: bool = True,
    donate: bool = False,
    **settings: Any,
) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
    """Prunes a model in one call.

    Args:
      params: any pytree of arrays.
      sparsity: share of weights to remove, in [0, 1].
      algorithm: a name that `create_updater_from_config` knows.
      apply_fn: `(params, *inputs) -> results`, the model; for wanda, ria, sparsegpt and synflow.
      loss_fn: `(params, *inputs) -> scalar`; for snip and grasp.
      batches: an iterable of inputs, for all that take one of the two: a tuple holds them, anything else is the only
        one.
      progress: those show a progress bar, if stderr is a terminal and rich is installed.
      donate: wanda, ria and sparsegpt change the parameters in place, where there is no memory for another copy: the
        arrays of `params` that are pruned can no longer be used, not even after an error.
      **settings: further keys of a configuration, such as `sparsity_type='2:4'`.

    Returns:
      The pruned parameters, and the masks, `None` where dense.

    Raises:
      ValueError: a wrong setting; the message says which.

    >>> import jax.numpy as jnp
    >>> prune({'w': jnp.array([[1.0, 2.0]])}, 0.5)[0]['w'].tolist()
    [[0.0, 2.0]]
    """
    updater = api.create_updater_from_config({'algorithm': algorithm, 'sparsity': sparsity, **settings})
    if donate and not isinstance(updater, CalibratedPruning):
        raise ValueError(f'{algorithm!r} makes a copy: leave donate out, or choose wanda, ria or sparsegpt')
    if isinstance(updater, PruningAtInitialization):
        return updater.instant_sparsify(params, apply_fn=apply_fn, loss_fn=loss_fn, batches=batches, progress=progress)
    if loss_fn is not None:
        raise ValueError(f'{algorithm!r} looks at no loss: leave loss_fn out, or choose snip or grasp')
    if isinstance(updater, CalibratedPruning):
        return updater.instant_sparsify(params, apply_fn=apply_fn, batches=batches, progress=progress, donate=donate)
    return updater.instant_sparsify(params)
