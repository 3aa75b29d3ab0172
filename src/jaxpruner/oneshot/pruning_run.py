"""Prunes the calibrated matrices of one model, and collects what there is to warn of."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import caller_warnings, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import matrix_masks
from jaxpruner.oneshot.calibration import CalibratedMatrices
from jaxpruner.oneshot.input_statistics import (
    InputStatistics,
    TooFewSamples,
    check_statistics,
    first_names,
    too_few_samples,
    warn_of_few_samples,
)
from jaxpruner.oneshot.leaf_targets import LeafTargets
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.pruning_queue import PruningQueue, QueuedMatrices


class MatrixPruner(Protocol):
    """The methods of `CalibratedPruning` that prune matrices; see there."""

    kind: ClassVar[str]
    per: str

    def prepare(self, statistics: InputStatistics, donate: bool) -> Any: ...

    def prune_matrices(
        self,
        weights: jax.Array,
        prepared: Any,
        sparsity: Any,
        sparsity_type: sparsity_types.SparsityType,
        where: str,
    ) -> tuple[jax.Array | None, jax.Array]: ...

    def reconstruct_matrices(
        self, weights: jax.Array, prepared: Any, mask: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]: ...

    def doubt(self, prepared: Any, where: str) -> str | None: ...

    def warn_of_doubts(self, doubts: Sequence[str]) -> None: ...


class PruningRun:
    """Prunes the leaves of one model in place.

    Attributes:
      pruner: how matrices are pruned.
      leaves: what is pruned.
      targets: what each leaf is to reach, by path.
      sparsities: those that OWL chose, one for each matrix, by path and reading of the matrices; of all others the
        leaf's target holds.
    """

    def __init__(self, pruner: MatrixPruner, leaves: PrunedLeaves, targets: LeafTargets):
        self.pruner = pruner
        self.leaves = leaves
        self.targets = targets
        self.sparsities: dict[Any, jax.Array] = {}
        self._few_samples: list[TooFewSamples] = []
        self._unseen: list[str] = []
        self._doubts: list[str] = []
        self._with_nan: list[str] = []

    def check(self, entries: Sequence[CalibratedMatrices]) -> None:
        """Refuses statistics that do not fit or are not finite; notes leaves with too few samples."""
        for matrices, statistics in entries:
            name = tree_lib.path_string(matrices.path)
            check_statistics(statistics, matrices.shape, name, self.pruner.kind == 'gram')
            few = too_few_samples(statistics, matrices.shape, name)
            if few is not None and few not in self._few_samples:
                self._few_samples.append(few)

    def prune(self, entries: list[CalibratedMatrices], owns_statistics: bool) -> None:
        """Prunes matrices, and takes them from the list.

        With `owns_statistics` nothing else holds them: what is prepared of a whole stack takes their place. Otherwise
        what is prepared of one layer's statistics is all that lies beside them.
        """
        prepare = functools.partial(self.pruner.prepare, donate=True) if owns_statistics else None
        queue = PruningQueue(entries, prepare)
        entries.clear()
        for queued in queue:
            self._prune_layers(queued)
            del queued  # before the next statistics are prepared

    def warn(self) -> None:
        """Warns once of each kind of doubt about what was pruned."""
        warn_of_few_samples(self._few_samples)
        if self._unseen:
            caller_warnings.warn(
                'the inputs of these matrices are zero in all batches, so that their weights are ranked by magnitude: '
                f'{first_names(self._unseen)}; give batches that reach them, or leave the leaves dense'
            )
        if self._with_nan:
            caller_warnings.warn(
                f'these leaves hold NaN, which ranks lowest and is removed first: {", ".join(self._with_nan)}; look '
                'for what went wrong when they were trained, or leave them dense'
            )
        self.pruner.warn_of_doubts(self._doubts)

    def _prune_layers(self, queued: QueuedMatrices) -> None:
        """Prunes the layers of a stack one by one, so that only one's new weights lie beside the old ones."""
        matrices, *arrays = queued
        if matrices.layer is not None or not self.leaves.has_layers(matrices):
            self._prune_matrices(queued)
            return
        for layer in range(matrices.shape[0]):
            arrays_of_layer = jax.tree.map(functools.partial(_at_layer, layer=layer), arrays)
            self._prune_matrices(QueuedMatrices(matrices.at_layer(layer), *arrays_of_layer))

    def _prune_matrices(self, queued: QueuedMatrices) -> None:
        pruner = self.pruner
        matrices, statistics, prepared, is_unseen = queued
        target = self.targets[matrices.path]
        where = matrices.where
        if statistics is not None:
            prepared = pruner.prepare(statistics, donate=False)
        weights = self.leaves.read(matrices)
        if target.mask is None:
            key = matrices.path, matrices.reading
            sparsity = self.sparsities.get(key, target.sparsity)
            sparsity = _at_layer(sparsity, matrices.layer)
            sparsity = jnp.asarray(sparsity, jnp.float32)
            new, kept = pruner.prune_matrices(
                weights, prepared, sparsity, target.sparsity_type, where
            )
            if weights.size and is_unseen.any():
                self._unseen += _names_of(where, is_unseen)
                magnitudes = jnp.abs(weights.astype(tree_lib.at_least_float32(weights.dtype)))
                by_magnitude = matrix_masks.keep_in_matrices(
                    magnitudes, sparsity, target.sparsity_type, pruner.per
                )
                is_unseen = is_unseen[..., None, None]
                kept = jnp.where(is_unseen, by_magnitude, kept)
                new = None if new is None else jnp.where(is_unseen, weights, new)
        else:
            kept = self.leaves.read(matrices, target.mask)
            new, kept = pruner.reconstruct_matrices(weights, prepared, kept)
        doubt = pruner.doubt(prepared, where)
        if doubt is not None:
            self._doubts.append(doubt)
        if _has_nan(weights):
            self._with_nan.append(where)
        del queued, weights, statistics, prepared  # before more memory is taken
        self.leaves.replace(matrices, new, kept)


def _names_of(where: str, is_unseen: jax.Array) -> list[str]:
    """Names the matrices for which it is true: the leaf, and their numbers if it has several."""
    names = []
    for index in np.argwhere(np.asarray(is_unseen)).tolist():
        names.append(f'{where}, matrix {", ".join(map(str, index))}' if index else where)
    return names


def _at_layer(each: Any, layer: int | None) -> Any:
    """Takes the value for a layer where there is one for each, else the one for all."""
    return each if layer is None or not jnp.ndim(each) else each[layer]


@jax.jit
def _has_nan(weights: jax.Array) -> jax.Array:
    """Looks for NaN in a program of its own: one that also replaced the weights in their leaf would copy the leaf."""
    return jnp.isnan(weights).any()
