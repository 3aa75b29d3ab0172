"""One pruning of one model: statistics are checked, sparsities chosen, and matrices pruned one after another."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_types
from jaxpruner.core import caller_warnings
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.progress import progress_bar
from jaxpruner.oneshot import matrix_masks, owl_blocks
from jaxpruner.oneshot.calibration import CalibratedMatrices, calibrate
from jaxpruner.oneshot.input_statistics import (
    InputStatistics,
    TooFewSamples,
    check_statistics,
    too_few_samples,
    warn_of_few_samples,
)
from jaxpruner.oneshot.jobs import Job, of_layer, one_by_one, take_job
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.sequential import SequentialCalibration
from jaxpruner.oneshot.weight_matrices import WeightMatrices

if TYPE_CHECKING:
    from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning


class Selected(NamedTuple):
    """A leaf that is to be pruned.

    Attributes:
      sparsity: share to remove.
      sparsity_type: unstructured or N:M; the axis of N:M is not looked at.
      mask: where it is known already, float32 in the leaf's shape; sparsity and type are not looked at then.

    >>> Selected(0.5, sparsity_types.Unstructured()).mask is None
    True
    """

    sparsity: Any
    sparsity_type: sparsity_types.SparsityType
    mask: jax.Array | None = None

    def check(self, path: tree_lib.Path, matrices: WeightMatrices) -> None:
        """Refuses a type that does not divide the inputs.

        Args:
          path: of the leaf.
          matrices: which of its matrices.

        Raises:
          ValueError: m does not divide the inputs.
        """
        if self.mask is None:
            shape = matrices.layout.matrices_shape
            matrix_masks.check_matrix_type(self.sparsity_type, shape, tree_lib.path_string(path))


class PruningRun:
    """Prunes the leaves of one model.

    Attributes:
      selected: what is pruned, by path.

    Args:
      pruner: how.
      pruned: the leaves; they are changed in place.
      selected: which.

    >>> from jaxpruner.oneshot import Wanda, calibrate
    >>> params = {'w': jnp.array([[1.0], [2.0]])}
    >>> calibration = calibrate(lambda params, x: x @ params['w'], params, [jnp.array([[9.0, 1.0], [9.0, 1.0]])])
    >>> pruned = PrunedLeaves(params)
    >>> run = PruningRun(Wanda(), pruned, {('w',): Selected(0.5, sparsity_types.Unstructured())})
    >>> run.prune_at_once(calibration, donate=False)
    >>> pruned.masks['w'].tolist()
    [[1], [0]]
    """

    def __init__(
        self,
        pruner: 'CalibratedPruning',
        pruned: PrunedLeaves,
        selected: dict[tree_lib.Path, Selected],
    ):
        self.selected = selected
        self._pruner, self._pruned = pruner, pruned
        self._few_samples: list[TooFewSamples] = []
        self._doubts: list[str] = []
        self._with_nan: list[str] = []

    def prune_at_once(
        self, calibration: Mapping[Any, Sequence[CalibratedMatrices]], donate: bool
    ) -> None:
        """Prunes all leaves by statistics of the dense model.

        Args:
          calibration: statistics by path.
          donate: nobody else looks at them: they are freed one after another.

        Raises:
          ValueError: statistics do not fit, or are not finite.
        """
        chosen = [(path, entry) for path in self.selected for entry in calibration[path]]
        self._check_statistics([(path, entry.matrices, entry.statistics) for path, entry in chosen])
        each = self._sparsities(chosen)
        jobs = [
            Job(path, *entry, sparsity)
            for (path, entry), sparsity in zip(chosen, each, strict=True)
        ]
        del calibration, chosen
        self._prune(jobs, donate)
        self._warn()

    def prune_in_blocks(self, apply_fn: Any, batches: list[Any], progress: bool) -> None:
        """Prunes each block when those before it are pruned.

        Args:
          apply_fn: `(params, *inputs) -> results`.
          batches: all of them.
          progress: show a progress bar.

        Raises:
          ValueError: as in `prune_at_once`, or blocks have no order.
        """
        pruner, only = self._pruner, list(self.selected)
        run = SequentialCalibration(
            apply_fn, self._pruned.params, batches, pruner.kind, only, pruner.blocks
        )
        for part in run.parts:
            self.selected[part.path].check(part.path, part.matrices)
        each = [self.selected[part.path].sparsity for part in run.parts]
        if pruner.owl:
            whole = calibrate(
                apply_fn, self._pruned.params, batches, 'second_moment', only, progress
            )
            each = self._sparsities([(path, entry) for path in whole for entry in whole[path]])
        total, done = len(run.blocks) * len(batches), itertools.count(1)
        del batches  # they go on as what they become
        with progress_bar(total, progress) as show:
            for number, block in enumerate(run.blocks):
                name = f'block {number + 1} of {len(run.blocks)}'
                taken = run.take(
                    number,
                    self._pruned.params,
                    lambda arrays, name=name: show(name, next(done), arrays),
                )
                self._check_statistics(
                    [(*part[:2], statistics) for part, statistics in taken], block.layer
                )
                jobs = [
                    Job(*part[:2], statistics, of_layer(each[i], block.layer), block.layer)
                    for i, (part, statistics) in zip(block.parts, taken, strict=True)
                ]
                del taken
                self._prune(jobs, donate=True)
        self._warn()

    def _check_statistics(
        self,
        taken: list[tuple[tree_lib.Path, WeightMatrices, InputStatistics]],
        layer: int | None = None,
    ) -> None:
        """Refuses statistics that do not fit; notes the leaves with too few samples."""
        for path, matrices, statistics in taken:
            self.selected[path].check(path, matrices)
            where, shape = (
                tree_lib.path_string(path),
                matrices.layout.matrices_shape[0 if layer is None else 1 :],
            )
            check_statistics(statistics, shape, where, self._pruner.kind == 'gram')
            found = too_few_samples(statistics, shape, where)
            if found is not None and found not in self._few_samples:
                self._few_samples.append(found)

    def _prune(self, jobs: list[Job], donate: bool) -> None:
        pruner, pruned = self._pruner, self._pruned
        # Beside statistics that stay there is what is made of a layer's, and no more.
        prepare = functools.partial(pruner.prepare, donate=True) if donate else None
        while jobs:
            for path, matrices, statistics, sparsity, layer, prepared in one_by_one(
                take_job(jobs, prepare), pruned
            ):
                if not prepared:
                    statistics = pruner.prepare(statistics, donate=False)
                selected, weights = self.selected[path], pruned.read(path, matrices, layer)
                if jnp.isnan(weights).any():
                    self._with_nan.append(_where(path, layer))
                if selected.mask is None:
                    share = jnp.asarray(sparsity, jnp.float32)
                    new, kept = pruner.prune_matrices(
                        weights, statistics, share, selected.sparsity_type, _where(path, layer)
                    )
                else:
                    kept = pruned.read(path, matrices, layer, selected.mask)
                    new, kept = pruner.reconstruct_matrices(weights, statistics, kept)
                doubt = pruner.doubt(statistics, _where(path, layer))
                self._doubts += [] if doubt is None else [doubt]
                del weights, statistics  # before more memory is taken
                pruned.replace(path, matrices, new, kept, layer)

    def _sparsities(self, chosen: list[tuple[tree_lib.Path, CalibratedMatrices]]) -> list[Any]:
        """One for each of the chosen, or with OWL one for each of their matrices."""
        pruner, each = self._pruner, [self.selected[path].sparsity for path, _ in chosen]
        if not pruner.owl or not chosen:
            return each
        leaves = [
            owl_blocks.OwlLeaf(path, *entry, self.selected[path].sparsity) for path, entry in chosen
        ]
        settings = owl_blocks.OwlSettings(
            pruner.owl_per, pruner.blocks or (), pruner.owl_multiple, pruner.owl_deviation
        )
        return owl_blocks.matrix_sparsities(leaves, self._pruned.read, settings)

    def _warn(self) -> None:
        warn_of_few_samples(self._few_samples)
        if self._with_nan:
            caller_warnings.warn(
                f'these leaves hold NaN, which ranks lowest and is removed first: {", ".join(self._with_nan)}; look '
                'for what went wrong when they were trained, or leave them dense'
            )
        self._pruner.warn_of_doubts(self._doubts)


def _where(path: tree_lib.Path, layer: int | None) -> str:
    name = tree_lib.path_string(path)
    return name if layer is None else f'{name}, layer {layer}'
