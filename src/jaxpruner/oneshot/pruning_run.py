"""Prunes calibrated matrices of one model, leaf by leaf, and collects what there is to warn of."""

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import caller_warnings, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import on_explicit_mesh
from jaxpruner.oneshot.calibrate import CalibratedMatrices
from jaxpruner.oneshot.matrices import WeightMatrices
from jaxpruner.oneshot.matrix_masks import keep_in_matrices
from jaxpruner.sparse_state import MASK_DTYPE

_MOST_NAMED = 5  # leaves in a warning


class LeafTarget(NamedTuple):
    """What a leaf is to reach: a share to remove as a sparsity type says, or a mask in the leaf's shape."""

    sparsity: Any
    sparsity_type: sparsity_types.SparsityType
    mask: jax.Array | None = None


LeafTargets = dict[tree_lib.Path, LeafTarget]


class PruningRun:
    """The leaves of one model while they are pruned. Those that are given stay as they are, unless they are donated.

    Attributes:
      pruner: a `CalibratedPruning`, which prunes matrices.
      targets: what each leaf is to reach, by path.
      sparsities: those that OWL chose, one for each matrix, by path and reading of the matrices; of all others the
        leaf's target holds.
    """

    def __init__(self, pruner: Any, params: tree_lib.PyTree, targets: LeafTargets, donate: bool):
        paths, leaves, self._treedef = tree_lib.flatten_with_paths(params)
        self.pruner = pruner
        self.targets = targets
        self.sparsities: dict[Any, jax.Array] = {}
        self._leaves: dict[tree_lib.Path, Any] = dict(zip(paths, leaves, strict=True))
        self._masks: dict[tree_lib.Path, jax.Array] = {}
        times = collections.Counter(map(id, leaves))  # an array may be two leaves
        self._donated = {path for path in paths if donate and times[id(self._leaves[path])] == 1}
        self._few_samples: dict[str, tuple[float, int]] = {}
        self._unseen: list[str] = []
        self._doubts: list[str] = []
        self._with_nan: list[str] = []

    @property
    def params(self) -> tree_lib.PyTree:
        """The parameters as they are now."""
        return jax.tree.unflatten(self._treedef, self._leaves.values())

    @property
    def masks(self) -> tree_lib.PyTree:
        """uint8 masks in the parameters' shapes, `None` for leaves of which nothing was pruned."""
        masks = list(map(self._masks.get, self._leaves))
        return tree_lib.unflatten(self._treedef, masks, self._leaves.values())

    def read(self, matrices: WeightMatrices, other: jax.Array | None = None) -> jax.Array:
        """Reads weight matrices as they are now, or those of another array of the leaf's shape, such as its mask."""
        leaf = self._leaves[matrices.path] if other is None else other
        return matrices.read(on_explicit_mesh(leaf, leaf))

    def prune(self, entries: list[CalibratedMatrices]) -> None:
        """Prunes matrices, and takes them from the list; those that share their statistics come together.

        Raises:
          ValueError: statistics do not fit, or are not finite, or new weights are not.
        """
        shared: dict[int, list[CalibratedMatrices]] = {}
        for entry in entries:
            self._check(entry)
            shared.setdefault(id(entry.statistics), []).append(entry)
        entries.clear()
        for key in list(shared):
            first, *others = shared.pop(key)
            matrices = [first.matrices, *(entry.matrices for entry in others)]
            is_unseen = np.asarray(jnp.all(first.statistics.second_moment == 0, -1))
            prepared = self.pruner.prepare(first.statistics)
            del first, others  # frees the statistics, unless they are what is prepared
            for part in matrices:
                self._prune(part, prepared, is_unseen)
            del prepared  # before the next statistics are prepared

    def warn(self) -> None:
        """Warns once of each kind of doubt about what was pruned."""
        if self._few_samples:
            few = self._few_samples.items()
            names = [
                f'{name} ({samples:g} samples, {size} inputs)' for name, (samples, size) in few
            ]
            times = max(math.ceil(size / samples) for samples, size in self._few_samples.values())
            caller_warnings.warn(
                f'samples are fewer than inputs, so that what they say of these is uncertain: {first_names(names)}; '
                f'calibrate with at least {times} times the number of samples'
            )
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

    def _check(self, entry: CalibratedMatrices) -> None:
        """Refuses statistics that do not fit or are not finite; notes leaves with too few samples."""
        matrices, statistics = entry
        where = tree_lib.path_string(matrices.path)
        inputs = matrices.shape[-2]
        expected = {'second_moment': matrices.shape[:-1]}
        if statistics.gram is not None:
            expected['gram'] = (*matrices.shape[:-1], inputs)
        elif self.pruner.kind == 'gram':
            raise ValueError(
                f"{where}: its statistics hold no Gram matrix; calibrate with kind='gram'"
            )
        for name, shape in expected.items():
            given = tuple(getattr(statistics, name).shape)
            if given != shape:
                raise ValueError(
                    f'{where}: {name} has shape {given}, and weight matrices of shape {matrices.shape} need {shape}'
                )
        if not jnp.isfinite(statistics.second_moment).all():
            raise ValueError(
                f'{where}: its inputs are not finite; look for NaN or inf in the batches and in the model'
            )
        counts = np.asarray(statistics.count, np.float64)
        samples = float(np.min(counts[counts > 0], initial=np.inf))  # zero has a warning of its own
        if samples < inputs:
            self._few_samples[where] = samples, inputs

    def _prune(self, matrices: WeightMatrices, prepared: Any, is_unseen: np.ndarray) -> None:
        pruner, path, where = self.pruner, matrices.path, matrices.where
        target = self.targets[path]
        weights = self.read(matrices)
        if bool(jnp.isnan(weights).any()):
            self._with_nan.append(where)
        if target.mask is not None:
            kept = self.read(matrices, target.mask)
            new, kept = pruner.reconstruct_matrices(weights, prepared, kept)
        else:
            sparsity = self.sparsities.get((path, matrices.reading), target.sparsity)
            sparsity = jnp.asarray(sparsity, jnp.float32)
            if matrices.layer is not None and sparsity.ndim:
                sparsity = sparsity[matrices.layer]
            new, kept = pruner.prune_matrices(
                weights, prepared, sparsity, target.sparsity_type, where
            )
            if weights.size and is_unseen.any():
                for index in np.argwhere(is_unseen).tolist():
                    number = f', matrix {", ".join(map(str, index))}' if index else ''
                    self._unseen.append(where + number)
                magnitudes = jnp.abs(weights.astype(tree_lib.at_least_float32(weights.dtype)))
                by_magnitude = keep_in_matrices(
                    magnitudes, sparsity, target.sparsity_type, pruner.per
                )
                kept = jnp.where(is_unseen[..., None, None], by_magnitude, kept)
                new = None if new is None else jnp.where(is_unseen[..., None, None], weights, new)
        doubt = pruner.doubt(prepared, where)
        if doubt is not None:
            self._doubts.append(doubt)
        if new is not None and not bool(jnp.isfinite(new).all()):
            raise ValueError(
                f'{tree_lib.path_string(path)}: its new weights are not finite; look for NaN or inf in it and in its '
                'inputs'
            )
        del weights
        given = leaf = self._leaves[path]
        is_first = path not in self._masks
        mask = jnp.ones(jnp.shape(leaf), MASK_DTYPE) if is_first else self._masks[path]
        if is_first and matrices.layer is not None and path not in self._donated:
            leaf = jnp.array(leaf, copy=True)  # whose layers are then replaced in place
        leaf, mask = on_explicit_mesh((leaf, mask), leaf)
        leaf, mask = matrices.replace(leaf, mask, new, kept)
        if isinstance(given, jax.Array):
            leaf, mask = jax.device_put((leaf, mask), given.sharding)
            if is_first and path in self._donated and not given.is_deleted():
                jax.block_until_ready(leaf)
                given.delete()
        self._leaves[path] = leaf
        self._masks[path] = mask


def first_names(names: Sequence[str]) -> str:
    """Lists the first names of a warning, and how many more there are."""
    more = f' and {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''
    return ', '.join(names[:_MOST_NAMED]) + more
