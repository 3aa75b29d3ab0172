"""Fits kernels that sum over removed channels to calibration inputs: the rows that stay make up for those that go.

A channel has a row in each kernel that sums over it. Without the channel, the kernel's output loses what the row added.
If channels are alike, the other rows of the kernel can add most of that. `oneshot` finds the kernels, computes the Gram
matrix of their inputs, and solves for the rows.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import CalibratedPruning
from jaxpruner.oneshot.batches import first_batch
from jaxpruner.oneshot.leaves import FollowedLeaves, follow_leaves, trace_model
from jaxpruner.oneshot.matrices import WeightMatrices
from jaxpruner.oneshot.pruning_run import first_names
from jaxpruner.oneshot.sparsegpt import fit_kept_inputs
from jaxpruner.tree import Path, PyTree

DAMPING = 1e-3


@dataclasses.dataclass
class _LeastSquares(CalibratedPruning):
    """Fits whole rows of matrices, those that masks keep."""

    kind: ClassVar[str] = 'gram'

    damping: float = DAMPING

    def __post_init__(self):
        super().__post_init__()
        self._most_damping = 0.0

    def reconstruct_matrices(self, weights, prepared, mask):
        is_kept = mask.any(-1)
        fitted = fit_kept_inputs(weights, prepared.gram, is_kept, self.damping)
        self._most_damping = float(jnp.max(fitted.damping, initial=0))
        return fitted.weights, mask

    def doubt(self, prepared, where):
        """The leaf, if the Gram matrix that was just decomposed needed more damping."""
        is_more = self._most_damping > max(self.damping, 1e-5) * 1.001
        return f'{where} ({self._most_damping:.2g} was used)' if is_more else None

    def warn_of_doubts(self, doubts):
        if doubts:
            caller_warnings.warn(
                f'Gram matrices could not be decomposed with damping {self.damping}: {first_names(doubts)}; give more '
                'samples, or set damping'
            )


def refit(
    apply_fn: Callable[..., Any],
    params: PyTree,
    zeroed_ones: PyTree,
    batches: Iterable[Any],
    *,
    damping: float,
    sequential: bool,
    progress: bool,
) -> PyTree:
    """Fits the kernels of the whole model. The rows of removed channels are zero in the result.

    Args:
      apply_fn: of the model.
      params: of the model.
      zeroed_ones: 1 where parameters stay, 0 at removed channels.
      batches: as in `oneshot.calibrate`.
      damping: see `fit_kept_inputs`.
      sequential: whether a kernel is fitted to a model in which the kernels before it are fitted already.
      progress: whether a progress bar is shown.
    """
    first, batches = first_batch(batches)
    paths, ones, treedef = tree_lib.flatten_with_paths(zeroed_ones)
    is_kept = dict(zip(paths, ones, strict=True))
    cut = [path for path in paths if not is_kept[path].all()]
    followed = follow_leaves(trace_model(apply_fn, params, first), cut)
    masks, left_out = _row_masks(followed, is_kept)
    for path, reason in followed.unclear.items():
        left_out[path] = reason
    _warn(left_out, has_masks=bool(masks))
    if not masks:
        return params
    masks_of_leaves = [masks.get(path) for path in paths]
    solver = _LeastSquares(damping=damping, sequential=sequential)
    fitted, _ = solver.instant_sparsify(
        params,
        apply_fn=apply_fn,
        batches=batches,
        masks=treedef.unflatten(masks_of_leaves),
        progress=progress,
    )
    return fitted


def _row_masks(
    followed: FollowedLeaves, is_kept: Mapping[Path, jax.Array]
) -> tuple[dict[Path, jax.Array], dict[Path, str]]:
    """Masks of the leaves that sum over removed channels; and such leaves that cannot be fitted, with reasons."""
    masks, left_out = {}, {}
    for path, parts in followed.matrices.items():
        mask = _row_mask(parts, is_kept[path])
        if mask.all():
            continue
        if path in followed.looked_up:
            left_out[path] = 'data look up its rows, too'
        else:
            masks[path] = mask
    return masks, left_out


def _row_mask(parts: Sequence[WeightMatrices], is_kept: jax.Array) -> jax.Array:
    """Masks the rows of removed channels in matrices that keep some rows. Removed columns stay until the cut."""
    mask = jnp.ones_like(is_kept)
    for matrices in parts:
        stays = matrices.read(is_kept) > 0
        row_stays = stays.any(-1, keepdims=True)
        keeps_some = row_stays.any(-2, keepdims=True)
        row_goes = ~row_stays & keeps_some
        removed = jnp.broadcast_to(row_goes, matrices.shape) * 1.0
        is_removed = matrices.write(removed, is_kept) > 0
        mask = jnp.where(is_removed, 0, mask)
    return mask


def _warn(left_out: Mapping[Path, str], has_masks: bool) -> None:
    reasons = [f'{tree_lib.path_string(path)} ({reason})' for path, reason in left_out.items()]
    if reasons:
        caller_warnings.warn(f'these leaves are cut without being fitted: {"; ".join(reasons)}')
    elif not has_masks:
        caller_warnings.warn(
            'nothing is fitted: no product of data and a kernel sums over both removed and kept channels'
        )
