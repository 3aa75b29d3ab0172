"""Pruning in one call, by name; the names of the one-shot algorithms."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxpruner import api, caller_warnings, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import batches as batches_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.at_initialization import SNIP, GraSP, PruningAtInitialization, SynFlow
from jaxpruner.oneshot.calibrate import SampleWeights
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.ria import RIA
from jaxpruner.oneshot.sparsegpt import SparseGPT
from jaxpruner.oneshot.wanda import Wanda
from jaxpruner.plan import PruningPlan
from jaxpruner.sparsity_types import NByM

for _algorithm in (Wanda, RIA, SparseGPT, SNIP, GraSP, SynFlow):
    api.register_one_shot_algorithm(_algorithm.__name__.lower(), _algorithm)


def prune(
    params: tree_lib.PyTree,
    sparsity: float | Mapping[Any, float | None] | None = None,
    algorithm: str = 'magnitude',
    *,
    apply_fn: Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batches: Iterable[Any] | None = None,
    masks: tree_lib.PyTree | None = None,
    progress: bool = True,
    donate: bool = False,
    weights: SampleWeights | None = None,
    **settings: Any,
) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
    """Prunes a model in one call.

    With `apply_fn` and `batches` any algorithm sees what the model does with each leaf. Groups of N:M then lie along
    the inputs, the axis that the model sums over. An axis that is named stays; but -1 is the default, and counts as not
    named, so that the last axis of a kernel of two has to be named as `NByM(2, 4, axis=1)`. Leaves that no contraction
    reads (biases, norms, positions) and lookups (embeddings, tied ones, too) stay dense, unless `custom_sparsity_map`,
    `sparsity_type` or `sparsity` names them. `print(jaxpruner.plan(…))` shows beforehand which leaves stay dense, and
    why. Without a model groups lie along the last axis, with a warning where `'2:4'` names none. SNIP, GraSP and
    SynFlow rank all leaves that are selected together and leave none alone.

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
      masks: for sparsegpt alone: masks from elsewhere, 0/1 in the parameters' shapes, `None` where dense. The weights
        that they keep make up for the others; a sparsity is not wanted then.
      progress: those show a progress bar, if stderr is a terminal and rich is installed.
      donate: wanda, ria and sparsegpt change the parameters in place, where there is no memory for another copy: the
        arrays of `params` that are pruned can no longer be used, not even after an error.
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
    if masks is not None and sparsity is not None:
        raise ValueError('masks say which weights go: leave the sparsity out')
    if masks is None:
        settings |= _sparsity_settings(sparsity, settings)
    pruner = api.create_updater_from_config({'algorithm': algorithm, **settings})
    name = repr(algorithm)
    if isinstance(pruner, CalibratedPruning):
        if loss_fn is None:
            batches_lib.check_model_is_given(name, 'prune', apply_fn, batches)
            model = {'apply_fn': apply_fn, 'batches': batches, 'masks': masks, 'weights': weights}
            return pruner.instant_sparsify(params, **model, progress=progress, donate=donate)
    elif masks is not None:
        raise ValueError(f'{name} makes masks of its own: leave masks out, or choose sparsegpt')
    elif donate:
        raise ValueError(
            f'{name} makes a copy: leave donate out, or choose wanda, ria or sparsegpt'
        )
    elif weights is not None:
        raise ValueError(
            f'{name} takes no statistics of inputs that weights could weigh: leave weights out (a loss '
            'weighs its samples itself), or choose wanda, ria or sparsegpt'
        )
    elif isinstance(pruner, PruningAtInitialization):
        return pruner.instant_sparsify(
            params, apply_fn=apply_fn, loss_fn=loss_fn, batches=batches, progress=progress
        )
    if loss_fn is not None:
        raise ValueError(f'{name} looks at no loss: leave loss_fn out, or choose snip or grasp')
    if apply_fn is None and batches is None:
        _warn_of_groups_along_the_last_axis(settings.get('sparsity_type'))
        return pruner.instant_sparsify(params)
    if apply_fn is None or batches is None:
        raise ValueError(
            f'{name} reads from a model which axes are its inputs, and takes both apply_fn=… and batches=… for '
            'that, or neither'
        )
    pruner, _ = leaves_lib.along_inputs(pruner, apply_fn, params, batches)
    with leaves_lib.ignore_vectors():
        return pruner.instant_sparsify(params)


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
    settings |= _sparsity_settings(sparsity, settings)
    pruner = api.create_updater_from_config({'algorithm': algorithm, **settings})
    if isinstance(pruner, CalibratedPruning):
        return pruner.plan(params, apply_fn=apply_fn, batches=batches)
    if isinstance(pruner, PruningAtInitialization) or (apply_fn is None and batches is None):
        return pruner.plan(params)
    batches_lib.check_model_is_given(repr(algorithm), 'plan', apply_fn, batches, ', or neither')
    pruner, why_dense = leaves_lib.along_inputs(pruner, apply_fn, params, batches)
    with leaves_lib.ignore_vectors():
        return leaves_lib.with_reasons(pruner.plan(params), why_dense)


def _types_in(setting: Any) -> list[Any]:
    """Lists the sparsity types of a setting, which may be a mapping or a list of pairs."""
    if isinstance(setting, list | tuple):
        return [entry for _, entry in setting]
    return list(setting.values()) if isinstance(setting, Mapping) else [setting]


def _warn_of_groups_along_the_last_axis(setting: Any) -> None:
    """Warns of N:M as a string that names no axis: its groups lie along the last one, which may be the outputs.

    An object `NByM` shows its axis, and so does the string `'nm_2,4,-1'`.
    """
    for entry in filter(sparsity_types.is_n_by_m_without_axis, _types_in(setting)):
        n_by_m: Any = sparsity_types.parse_sparsity_type(entry)
        n, m, _ = n_by_m
        caller_warnings.warn(
            f'sparsity_type={entry!r} names no axis, so that its groups lie along the last one, which in most '
            'layouts of JAX are the outputs, where hardware wants the inputs; give the model, apply_fn=… and '
            f"batches=…, or NByM({n}, {m}, axis=…); 'nm_{n},{m},-1' says that the last axis is meant"
        )
        return


def _sparsity_settings(sparsity: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Turns the argument `sparsity` into settings of a configuration; takes `filter_fn` from the others."""
    if sparsity is None:
        types = _types_in(
            sparsity_types.normalize_setting(settings.get('sparsity_type') or 'unstructured')
        )
        # What a function returns is unknown before it is called.
        may_be_n_by_m = any(isinstance(each, NByM) or callable(each) for each in types)
        if (
            not may_be_n_by_m
            and not {'custom_sparsity_map', 'sparsity_distribution_fn'} & settings.keys()
        ):
            raise ValueError(
                'prune needs a sparsity, such as 0.5, unless sparsity_type is N:M, or custom_sparsity_map is given'
            )
        return {}
    if isinstance(sparsity, str):
        raise TypeError(
            f'sparsity is a number or a mapping, got {sparsity!r}: prune(params, 0.5, {sparsity!r})'
        )
    if not isinstance(sparsity, Mapping):
        return {'sparsity': sparsity}
    for key in ('custom_sparsity_map', 'sparsity_distribution_fn', 'dist_type'):
        if key in settings:
            raise ValueError(
                f'a mapping of sparsities says all about the distribution: leave {key} out'
            )
    distribution = functools.partial(leaves_lib.sparsities_by_name, sparsities=dict(sparsity))
    if 'filter_fn' in settings:
        distribution = functools.partial(distribution, filter_fn=settings.pop('filter_fn'))
    return {'sparsity_distribution_fn': distribution}
