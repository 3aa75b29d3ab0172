"""Pruning in one call, by name; the names of the one-shot algorithms."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxpruner import api
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.at_initialization import SNIP, GraSP, PruningAtInitialization, SynFlow
from jaxpruner.oneshot.calibrate import SampleWeights
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.sparsegpt import SparseGPT
from jaxpruner.oneshot.wanda import RIA, Wanda
from jaxpruner.plan import PruningPlan

for _algorithm in (Wanda, RIA, SparseGPT, SNIP, GraSP, SynFlow):
    api.ONE_SHOT_REGISTRY[_algorithm.__name__.lower()] = _algorithm


def prune(
    params: tree_lib.PyTree,
    sparsity: float | Mapping[Any, float | None] | None = None,
    algorithm: str = 'magnitude',
    *,
    apply_fn: Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batches: Iterable[Any] | None = None,
    progress: bool = True,
    weights: SampleWeights | None = None,
    **settings: Any,
) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
    """Prunes a model in one call.

    With `apply_fn` and `batches` any algorithm sees what the model does with each leaf. Groups of N:M then lie along
    the inputs, the axis that the model sums over. An axis that is named stays; but -1 is the default, and counts as not
    named, so that the last axis of a kernel of two has to be named as `NByM(2, 4, axis=1)`. Leaves that no contraction
    reads (biases, norms, positions) and lookups (embeddings, tied ones, too) stay dense, unless `custom_sparsity_map`,
    `sparsity_type` or `sparsity` names them; but without a contraction there are no statistics of inputs to prune by.
    `print(jaxpruner.plan(…))` shows beforehand which leaves stay dense, and why. Without a model groups lie along the
    last axis where `'2:4'` names none. SNIP, GraSP and SynFlow rank all leaves that are selected together and leave
    none alone.

    Args:
      params: any pytree of arrays.
      sparsity: share of weights to remove, in [0, 1]; or a mapping from leaf names or globs to shares (`None` = dense),
        of which the first that matches counts, and leaves without one stay dense. A glob selects leaves of floats with
        more than one dimension (or those of `filter_fn`), a full name any leaf. May be left out where `sparsity_type`
        is N:M, also beside `custom_sparsity_map`: leaves that this does not name then have the share of their type.
      algorithm: a name that `create_updater_from_config` knows.
      apply_fn: `(params, *inputs) -> results`, the model; wanda, ria, sparsegpt and synflow need it.
      loss_fn: `(params, *inputs) -> scalar`; for snip and grasp.
      batches: an iterable of inputs, for all that take one of the two: a tuple holds them, anything else is the only
        one. Algorithms that look at weights alone read the first one's shapes.
      progress: those show a progress bar, if stderr is a terminal and rich is installed.
      weights: for wanda, ria and sparsegpt: `batch -> array`, how much each sample counts, such as 0 for padding:
        `lambda batch: batch['mask']`. The array has the shape of the leading axes of the inputs, `(batch, length)`.
      **settings: further keys of a configuration, such as `sparsity_type='2:4'`.

    Returns:
      The pruned parameters, and the masks, `None` where dense. Where nothing was pruned, a warning says why.

    Raises:
      TypeError: `sparsity` is no number and no mapping, or a batch holds another number of inputs than the model takes.
      ValueError: a wrong setting, or a model that does not use its parameters; the message says which.

    >>> import jax.numpy as jnp
    >>> prune({'w': jnp.array([[1.0, 2.0]])}, 0.5)[0]['w'].tolist()
    [[0.0, 2.0]]
    >>> params = {'a': jnp.array([[1.0, 2.0]]), 'b': jnp.array([[3.0, 4.0]])}
    >>> prune(params, {'a': 0.5})[1]
    {'a': Array([[0, 1]], dtype=uint8), 'b': None}
    """
    pruner = _pruner_of(sparsity, algorithm, settings)
    given = {'apply_fn': apply_fn, 'loss_fn': loss_fn, 'batches': batches, 'weights': weights}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(pruner, CalibratedPruning | PruningAtInitialization):
        return pruner.instant_sparsify(params, **given, progress=progress)
    if 'apply_fn' in given or 'batches' in given:
        model = given.pop('apply_fn', None), given.pop('batches', None)
        followed, traced = leaves_lib.follow_model(pruner, params, *model)
        types, _ = leaves_lib.along_inputs(pruner, params, followed, traced.graph)
        pruner = leaves_lib.with_types(pruner, types)
    with leaves_lib.ignore_vectors():
        return pruner.instant_sparsify(params, **given)


def plan(
    params: tree_lib.PyTree,
    sparsity: float | Mapping[Any, float | None] | None = None,
    algorithm: str = 'magnitude',
    *,
    apply_fn: Callable[..., Any] | None = None,
    batches: Iterable[Any] | None = None,
    **settings: Any,
) -> PruningPlan:
    """Tells what `prune` would do with each leaf: its type, its target, or why it stays dense.

    Nothing is computed on a device. `print(plan(…))` shows a table.

    Args:
      params: the parameters, or their shapes.
      sparsity: as for `prune`.
      algorithm: as for `prune`.
      apply_fn: the model, as for `prune`, also for algorithms that look at weights alone.
      batches: an iterable of inputs, of which the first one's shapes are looked at.
      **settings: further keys of a configuration.

    Raises:
      TypeError, ValueError: as `prune`.

    >>> import jax.numpy as jnp
    >>> params = {'tokens': jnp.ones((12, 8)), 'kernel': jnp.ones((8, 4)), 'scale': jnp.ones((1, 4))}
    >>> apply_fn = lambda params, ids: params['tokens'][ids] @ params['kernel'] * params['scale']
    >>> print(plan(params, 0.5, apply_fn=apply_fn, batches=[jnp.arange(3)]))
    MagnitudePruning prunes 1 of 3 leaves
    leaf    shape  dtype    type, or why it stays dense          target  kept   of
    ------------------------------------------------------------------------------
    kernel  8×4    float32  unstructured                            0.5    16   32
    scale   1×4    float32  dense: no contraction reads it            -     4    4
    tokens  12×8   float32  dense: data look up its rows (an          -    96   96
                            embedding); a setting that names it
                            prunes it
    ------------------------------------------------------------------------------
    total                                                        0.1212   116  132
    """
    pruner = _pruner_of(sparsity, algorithm, settings)
    if isinstance(pruner, CalibratedPruning):
        return pruner.plan(params, apply_fn=apply_fn, batches=batches)
    if isinstance(pruner, PruningAtInitialization) or (apply_fn is None and batches is None):
        return pruner.plan(params)
    return leaves_lib.plan_with_model(pruner, params, apply_fn, batches)


def _pruner_of(sparsity: Any, algorithm: str, settings: dict[str, Any]) -> Any:
    """Makes the pruner of that name; the argument `sparsity` is one or two keys of its configuration."""
    if isinstance(sparsity, Mapping):
        settings = _settings_by_name(sparsity, settings)
    else:
        settings = {**settings, 'sparsity': sparsity}
    return api.create_updater_from_config({'algorithm': algorithm, **settings})


def _settings_by_name(sparsities: Mapping[Any, Any], settings: dict[str, Any]) -> dict[str, Any]:
    for key in ('custom_sparsity_map', 'sparsity_distribution_fn', 'dist_type'):
        if key in settings:
            raise ValueError(
                f'a mapping of sparsities says all about the distribution: leave {key} out'
            )
    others, keywords = dict(settings), {'sparsities': dict(sparsities)}
    if 'filter_fn' in others:
        keywords['filter_fn'] = others.pop('filter_fn')
    distribution = functools.partial(leaves_lib.sparsities_by_name, **keywords)
    return {**others, 'sparsity_distribution_fn': distribution}
