"""The base of pruners that calibrate a model on some batches, then prune it once."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import base_updater, caller_warnings, mask_calculator, sparsity_types, targets
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import matrix_masks, matrix_scores, owl
from jaxpruner.oneshot.batches import as_inputs, check_inputs, first_batch
from jaxpruner.oneshot.blocks import Names
from jaxpruner.oneshot.calibration import CalibratedMatrices, Calibration, calibrate
from jaxpruner.oneshot.followed_leaves import choose_leaves, follow_leaves, ignore_vectors
from jaxpruner.oneshot.input_statistics import (
    InputStatistics,
    TooFewSamples,
    check_statistics,
    too_few_samples,
    warn_of_few_samples,
)
from jaxpruner.oneshot.jobs import Job, of_layer, one_by_one, take_job
from jaxpruner.oneshot.named_leaves import names_of
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.sequential import SequentialCalibration
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.progress import progress_bar
from jaxpruner.uses import UseGraph, param_uses


@dataclasses.dataclass
class CalibratedPruning(base_updater.BaseUpdater):
    """Base of the pruners that look at what the inputs of each weight matrix are.

    Leaves that the distribution selects and that are contracted with data are pruned; all others (embeddings that are
    looked up, biases, norms) stay dense. Masks are made once: to fine-tune with them, use `FixedMask`.

    Attributes:
      per: what is ranked together where unstructured: the inputs of one `'output'`, or a `'layer'`.
      owl: layers with many outliers stay denser; the mean over all leaves stays what the distribution says.
      owl_multiple: an outlier exceeds this multiple of the mean score of its layer.
      owl_deviation: how far a layer's sparsity may be from the mean.
      sequential: statistics of a block are taken when the blocks before it have been pruned, so that only its own take
        memory. Each block is run twice; all batches are held, as they are at the boundary of the block.
      blocks: which leaves make a block if sequential: a glob or a list of globs for each, such as `['layer_0/*',
        'layer_1/*']`. Of other leaves those make a block that meet the same value, or stand in the same trip of a scan.

    Raises:
      TypeError, ValueError: a setting is wrong.

    >>> CalibratedPruning(sparsity_type='2:4').per
    'output'
    """

    kind: ClassVar[str] = 'second_moment'

    per: str = 'output'
    owl: bool = False
    owl_multiple: float = 5.0
    owl_deviation: float = 0.08
    sequential: bool = False
    blocks: Sequence[Names] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.blocks is not None and not self.sequential:
            raise ValueError('blocks are pruned one after another with sequential=True alone; set it, or no blocks')
        if mask_calculator.own_topk_fn(self.topk_fn) is not None:
            raise ValueError(f'{type(self).__name__} ranks weights itself and takes no topk_fn, got {self.topk_fn!r}')

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses all but unstructured and N:M, and OWL with N:M, which leaves no choice of a sparsity."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            if self.owl:
                raise ValueError(f'{where}owl=True chooses sparsities, which {sparsity_type!r} sets; leave one out')
        elif not isinstance(sparsity_type, sparsity_types.Unstructured):
            raise TypeError(f'{where}calibrated pruning is unstructured or N:M, got {sparsity_type!r}')

    def prepare(self, statistics: InputStatistics, donate: bool) -> Any:
        """What `prune_matrices` is to be given for statistics; made once for leaves that share them, if it can be.

        Args:
          statistics: of the inputs of some weight matrices.
          donate: nobody else looks at the statistics: what is returned may take their memory.

        Returns:
          Any pytree of arrays; those of a stack have an axis of the layers first, as in the statistics.
        """
        del donate
        return statistics

    def prune_matrices(
        self,
        weights: jax.Array,
        statistics: Any,
        sparsity: Any,
        sparsity_type: sparsity_types.SparsityType,
        where: str,
    ) -> tuple[jax.Array | None, jax.Array]:
        """Prunes the weight matrices of a leaf.

        Args:
          weights: `[..., inputs, outputs]`.
          statistics: of their inputs, as `prepare` returns them.
          sparsity: a scalar, or one for each matrix.
          sparsity_type: unstructured, or N:M along the inputs.
          where: the leaf's path, for messages.

        Returns:
          New weights (`None` if those that are kept do not change), and the mask.
        """
        raise NotImplementedError(f'{type(self).__name__} must define prune_matrices')

    def instant_sparsify(
        self,
        params: tree_lib.PyTree,
        grads: None = None,
        *,
        apply_fn: Callable[..., Any] | None = None,
        batches: Iterable[Any] | None = None,
        calibration: Calibration | None = None,
        progress: bool = True,
        donate: bool = False,
        **extra_args: Any,
    ) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
        """Calibrates the model and prunes it to the target sparsities.

        Args:
          params: any pytree of arrays.
          grads: not used.
          apply_fn: `(params, *inputs) -> results`, the model.
          batches: any iterable of batches: a tuple holds the inputs, anything else is the only input.
          calibration: statistics from `calibrate` with the same model and parameters, instead of the two.
          progress: show a progress bar, if stderr is a terminal and rich is installed.
          donate: change the parameters in place, where there is no memory for another copy: the arrays of `params` that
            are pruned can no longer be used, not even after an error.
          **extra_args: not used.

        Returns:
          The pruned parameters, and the (unpacked) masks.

        Raises:
          ValueError: sparsities or shapes do not fit, or what it takes to calibrate is missing.
          UnsupportedPrimitive: a selected leaf goes through an operation that is not understood.
        """
        del grads, extra_args
        selected = self._selected(params)
        if calibration is not None and self.sequential:
            raise ValueError('sequential=True takes statistics as it goes; give apply_fn and batches alone')
        pruned = PrunedLeaves(params, donate)
        if calibration is not None:
            selected = self._with_statistics(calibration, selected)
            self._prune_at_once(pruned, calibration, selected, donate=False)
            return pruned.params, pruned.masks
        if apply_fn is None or batches is None:
            raise ValueError(
                f'{type(self).__name__} looks at the inputs of each layer; give instant_sparsify the model and data: '
                'apply_fn=…, batches=…'
            )
        first, batches = first_batch(batches)
        check_inputs(apply_fn, first)
        selected = self._followed(param_uses(apply_fn, params, *as_inputs(first)), selected)
        if self.sequential:
            self._prune_in_blocks(pruned, apply_fn, list(batches), selected, progress)
        else:
            calibration = calibrate(apply_fn, params, batches, self.kind, list(selected), progress)
            self._prune_at_once(pruned, calibration, selected, donate=True)
        return pruned.params, pruned.masks

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The target of each leaf; whether its sparsity type fits is seen when it is known how the leaf is used."""
        paths, leaves, _ = tree_lib.flatten_with_paths(params)

        def check(sparsity_type: Any, path: tree_lib.Path, shape: tuple[int, ...]) -> None:
            del shape
            self.check_type(sparsity_type, f'{tree_lib.path_string(path)}: ')

        with ignore_vectors():
            return targets.of_leaves(
                self.sparsity_distribution_fn, params, self._leaf_types(paths, leaves), self.stacked, check
            )

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refused: masks are made once, from batches that an optimizer does not see."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, apply_fn=…, '
            'batches=…), then FixedMask(masks).wrap_optax(tx) to fine-tune'
        )

    def _selected(self, params: tree_lib.PyTree) -> dict[tree_lib.Path, '_Selected']:
        sparsities = self.get_target_sparsities(params)
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        for names in self.blocks or ():
            tree_lib.check_names((names,) if isinstance(names, str) else names, paths, 'blocks')
        rows = zip(paths, tree_lib.leaves_like(treedef, sparsities), self._leaf_types(paths, leaves), strict=True)
        return {path: _Selected(sparsity, kind) for path, sparsity, kind in rows if sparsity is not None}

    def _followed(self, graph: UseGraph, selected: dict[Any, '_Selected']) -> dict[Any, '_Selected']:
        """Those leaves that can be pruned; what does not fit is said before anything is computed."""
        followed = follow_leaves(graph, selected)
        chosen = choose_leaves(followed, names_of(self), type(self).__name__)
        for path in chosen:
            for matrices in followed.matrices[path]:
                self._check(path, matrices, selected[path].kind)
        return {path: selected[path] for path in chosen}

    def _with_statistics(self, calibration: Calibration, selected: dict[Any, '_Selected']) -> dict[Any, '_Selected']:
        """Those leaves of which statistics are given; says of others why they stay dense."""
        followed = getattr(calibration, 'followed', None)
        chosen = [path for path in selected if path in calibration]
        if followed is not None:
            chosen = choose_leaves(followed.among(selected), names_of(self), type(self).__name__)
        known = {*chosen, *(followed.paths if followed is not None else ())}
        missing = [tree_lib.path_string(path) for path in selected if path not in known]
        if missing:
            caller_warnings.warn(
                f'{", ".join(missing)}: the calibration has no statistics of these leaves, which stay dense; calibrate '
                'without only=…, or leave them out of sparsity_distribution_fn'
            )
        return {path: selected[path] for path in chosen}

    def _prune_at_once(
        self, pruned: PrunedLeaves, calibration: Calibration, selected: dict[Any, '_Selected'], donate: bool
    ) -> None:
        """All leaves by statistics of the dense model."""
        chosen = [(path, entry) for path in selected for entry in calibration[path]]
        lacking = self._check_statistics([(path, *entry) for path, entry in chosen], selected)
        warn_of_few_samples(lacking)
        each = self._sparsities(pruned, chosen, selected)
        jobs = [Job(path, *entry, sparsity) for (path, entry), sparsity in zip(chosen, each, strict=True)]
        del calibration, chosen  # statistics are freed one after another
        self._prune(pruned, jobs, selected, donate)

    def _prune_in_blocks(
        self, pruned: PrunedLeaves, apply_fn: Any, batches: list[Any], selected: dict[Any, '_Selected'], progress: bool
    ) -> None:
        """Each block when those before it are pruned."""
        run = SequentialCalibration(apply_fn, pruned.params, batches, self.kind, list(selected), self.blocks)
        for part in run.parts:
            self._check(part.path, part.matrices, selected[part.path].kind)
        each = [selected[part.path].sparsity for part in run.parts]
        if self.owl:
            whole = calibrate(apply_fn, pruned.params, batches, 'second_moment', list(selected), progress)
            each = self._sparsities(pruned, [(path, entry) for path in whole for entry in whole[path]], selected)
        total, done = len(run.blocks) * len(batches), itertools.count(1)
        lacking: list[TooFewSamples] = []
        del batches  # they go on as what they become
        with progress_bar(total, progress) as show:
            for number, block in enumerate(run.blocks):
                name = f'block {number + 1} of {len(run.blocks)}'
                taken = run.take(number, pruned.params, lambda arrays, name=name: show(name, next(done), arrays))
                entries = [(*part[:2], statistics) for part, statistics in taken]
                lacking += self._check_statistics(entries, selected, block.layer)
                jobs = [
                    Job(*part[:2], statistics, of_layer(each[i], block.layer), block.layer)
                    for i, (part, statistics) in zip(block.parts, taken, strict=True)
                ]
                del taken, entries
                self._prune(pruned, jobs, selected, donate=True)
        warn_of_few_samples(lacking)

    def _check_statistics(
        self, taken: list[tuple[Any, ...]], selected: dict[Any, '_Selected'], layer: int | None = None
    ) -> list[TooFewSamples]:
        """Refuses statistics that do not fit; returns the leaves with too few samples."""
        lacking = []
        for path, matrices, statistics in taken:
            self._check(path, matrices, selected[path].kind)
            where, shape = tree_lib.path_string(path), matrices.layout.matrices_shape[0 if layer is None else 1 :]
            check_statistics(statistics, shape, where, self.kind == 'gram')
            lacking.append(too_few_samples(statistics, shape, where))
        return [leaf for leaf in lacking if leaf is not None]

    def _prune(self, pruned: PrunedLeaves, jobs: list[Job], selected: dict[Any, '_Selected'], donate: bool) -> None:
        # Beside statistics that stay there is what is made of a layer's, and no more.
        prepare = functools.partial(self.prepare, donate=True) if donate else None
        while jobs:
            for path, matrices, statistics, sparsity, layer, prepared in one_by_one(take_job(jobs, prepare), pruned):
                if not prepared:
                    statistics = self.prepare(statistics, donate=False)
                weights, where = pruned.read(path, matrices, layer), tree_lib.path_string(path)
                if layer is not None:
                    where = f'{where}, layer {layer}'
                sparsity, kind = jnp.asarray(sparsity, jnp.float32), selected[path].kind
                new, kept = self.prune_matrices(weights, statistics, sparsity, kind, where)
                del weights, statistics  # before more memory is taken
                pruned.replace(path, matrices, new, kept, layer)

    def _check(self, path: tree_lib.Path, matrices: WeightMatrices, kind: Any) -> None:
        matrix_masks.check_matrix_type(kind, matrices.layout.matrices_shape, tree_lib.path_string(path))

    def _sparsities(
        self,
        pruned: PrunedLeaves,
        chosen: list[tuple[tree_lib.Path, CalibratedMatrices]],
        selected: dict[Any, '_Selected'],
    ) -> list[Any]:
        """One for each of the chosen, or with OWL one for each of their matrices."""
        each = [selected[path].sparsity for path, _ in chosen]
        if not self.owl or not chosen:
            return each
        shares, sizes, means = [], [], []
        for (path, entry), sparsity in zip(chosen, each, strict=True):
            weights = pruned.read(path, entry.matrices)
            scores = matrix_scores.wanda_scores(weights, entry.statistics.second_moment)
            shares.append(owl.outlier_shares(scores, self.owl_multiple))
            sizes += [scores.size // shares[-1].size] * shares[-1].size
            means += [float(sparsity)] * shares[-1].size
        flat = jnp.concatenate([share.ravel() for share in shares]).tolist()
        sparsities = owl.owl_sparsities(flat, sizes, float(np.average(means, weights=sizes)), self.owl_deviation)
        ends = itertools.accumulate(share.size for share in shares)
        return [
            jnp.asarray(sparsities[end - share.size : end], jnp.float32).reshape(share.shape)
            for end, share in zip(ends, shares, strict=True)
        ]


class _Selected(NamedTuple):
    """A leaf that is to be pruned."""

    sparsity: Any
    kind: sparsity_types.SparsityType
