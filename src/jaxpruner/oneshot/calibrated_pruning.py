"""The base of pruners that calibrate a model on some batches, then prune it once."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, sparsity_types
from jaxpruner.base_updater import targets
from jaxpruner.core import caller_warnings
from jaxpruner.core import tree as tree_lib
from jaxpruner.mask_calculator import calculators
from jaxpruner.oneshot import given_masks
from jaxpruner.oneshot.batches import as_inputs, check_inputs, first_batch
from jaxpruner.oneshot.blocks import Names
from jaxpruner.oneshot.calibration import Calibration, calibrate
from jaxpruner.oneshot.followed_leaves import (
    FollowedLeaves,
    check_used,
    choose_leaves,
    follow_leaves,
    ignore_vectors,
    warn_of_unclear,
)
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.named_leaves import names_of
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.pruning_run import PruningRun, Selected
from jaxpruner.uses import UseGraph, param_uses

_ANY_TYPE = sparsity_types.Unstructured()


@dataclasses.dataclass
class CalibratedPruning(base_updater.BaseUpdater):
    """Base of the pruners that look at what the inputs of each weight matrix are.

    Leaves that the distribution selects and that are contracted with data are pruned; all others (embeddings that are
    looked up, biases, norms) stay dense. Masks are made once: to fine-tune with them, use `FixedMask`.

    Attributes:
      per: what is ranked together where unstructured: the inputs of one `'output'`, or a `'layer'`.
      owl: blocks with many outliers stay denser; the mean over all weights stays what the distribution says.
      owl_per: what has one sparsity with OWL: a `'block'` (all matrices of a transformer's layer, as published), or a
        `'leaf'` (each matrix of a stack).
      owl_multiple: an outlier exceeds this multiple of the mean score of its block.
      owl_deviation: how far a block's sparsity may be from the mean.
      sequential: statistics of a block are taken when the blocks before it have been pruned, so that only its own take
        memory. Each block is run two or three times; all batches are held, as they are between two blocks.
      blocks: which leaves make a block: a glob or a list of globs for each, such as `['layer_0/*', 'layer_1/*']`. Of
        other leaves those make a block that stand in the same trip of a scan; of the rest it is those that meet the
        same value if sequential, and for OWL those whose paths begin alike up to a part that is numbered.

    Raises:
      TypeError, ValueError: a setting is wrong.

    >>> CalibratedPruning(sparsity_type='2:4').per
    'output'
    """

    kind: ClassVar[str] = 'second_moment'
    ranked_together: ClassVar[str] = 'other'

    per: str = 'output'
    owl: bool = False
    owl_per: str = 'block'
    owl_multiple: float = 5.0
    owl_deviation: float = 0.08
    sequential: bool = False
    blocks: Sequence[Names] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.blocks is not None and not (
            self.sequential or (self.owl and self.owl_per == 'block')
        ):
            raise ValueError(
                'blocks are for sequential=True, or for owl=True per block; set one of them, or no blocks'
            )
        if calculators.own_topk_fn(self.topk_fn) is not None:
            raise ValueError(
                f'{type(self).__name__} ranks weights itself and takes no topk_fn, got {self.topk_fn!r}'
            )

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses all but unstructured and N:M, and OWL with N:M, which leaves no choice of a sparsity."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            if self.owl:
                raise ValueError(
                    f'{where}owl=True chooses sparsities, which {sparsity_type!r} sets; leave one out'
                )
        elif not isinstance(sparsity_type, sparsity_types.Unstructured):
            raise TypeError(
                f'{where}calibrated pruning is unstructured or N:M, got {sparsity_type!r}'
            )

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

    def reconstruct_matrices(
        self, weights: jax.Array, statistics: Any, mask: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]:
        """Changes the weights that a mask from elsewhere keeps, to make up for the others; SparseGPT alone does.

        Args:
          weights: `[..., inputs, outputs]`.
          statistics: of their inputs, as `prepare` returns them.
          mask: in the weights' shape.

        Returns:
          New weights, and the mask.
        """
        raise NotImplementedError(f'{type(self).__name__} must define reconstruct_matrices')

    def doubt(self, prepared: Any, where: str) -> str | None:
        """What a warning says of a leaf's statistics, `None` for nothing.

        Args:
          prepared: as `prepare` returned them.
          where: the leaf's path.
        """
        del prepared, where

    def warn_of_doubts(self, doubts: Sequence[str]) -> None:
        """One warning of all doubts.

        Args:
          doubts: at the end, as `doubt` returned them.
        """
        del doubts

    def instant_sparsify(
        self,
        params: tree_lib.PyTree,
        grads: None = None,
        *,
        apply_fn: Callable[..., Any] | None = None,
        batches: Iterable[Any] | None = None,
        calibration: Calibration | None = None,
        masks: tree_lib.PyTree | None = None,
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
          masks: from elsewhere, 0/1 in the parameters' shapes, `None` where dense. SparseGPT changes the weights that
            they keep; sparsities and types are not looked at.
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
        if masks is not None:
            self._check_reconstructs()
            given = given_masks.check_masks(params, masks)
            selected = {
                path: Selected(0.0, _ANY_TYPE, mask.astype(jnp.float32))
                for path, mask in given.items()
            }
        else:
            given, selected = {}, self._selected(params)
        if calibration is not None and self.sequential:
            raise ValueError(
                'sequential=True takes statistics as it goes; give apply_fn and batches alone'
            )
        pruned = PrunedLeaves(params, donate)
        if calibration is not None:
            run = PruningRun(self, pruned, self._with_statistics(calibration, selected))
            run.prune_at_once(calibration, donate=False)
            return self._result(pruned, given)
        if apply_fn is None or batches is None:
            raise ValueError(
                f'{type(self).__name__} looks at the inputs of each layer; give instant_sparsify the model and data: '
                'apply_fn=…, batches=…'
            )
        first, batches = first_batch(batches)
        check_inputs(apply_fn, first, params=params)
        run = PruningRun(
            self, pruned, self._followed(param_uses(apply_fn, params, *as_inputs(first)), selected)
        )
        if self.sequential:
            run.prune_in_blocks(apply_fn, list(batches), progress)
        else:
            only = list(run.selected)
            run.prune_at_once(
                calibrate(apply_fn, params, batches, self.kind, only, progress), donate=True
            )
        return self._result(pruned, given)

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The target of each leaf; whether its sparsity type fits is seen when it is known how the leaf is used."""
        paths, leaves, _ = tree_lib.flatten_with_paths(params)

        def check(sparsity_type: Any, path: tree_lib.Path, shape: tuple[int, ...]) -> None:
            del shape
            self.check_type(sparsity_type, f'{tree_lib.path_string(path)}: ')

        with ignore_vectors():
            return targets.of_leaves(
                self.sparsity_distribution_fn,
                params,
                self._leaf_types(paths, leaves),
                self.stacked,
                check,
            )

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refused: masks are made once, from batches that an optimizer does not see."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, apply_fn=…, '
            'batches=…), then FixedMask(masks).wrap_optax(tx) to fine-tune'
        )

    def _selected(self, params: tree_lib.PyTree) -> dict[tree_lib.Path, Selected]:
        sparsities = self.get_target_sparsities(params)
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        for names in self.blocks or ():
            tree_lib.check_names((names,) if isinstance(names, str) else names, paths, 'blocks')
        rows = zip(
            paths,
            tree_lib.leaves_like(treedef, sparsities),
            self._leaf_types(paths, leaves),
            strict=True,
        )
        return {
            path: Selected(sparsity, kind) for path, sparsity, kind in rows if sparsity is not None
        }

    def _followed(self, graph: UseGraph, selected: dict[Any, Selected]) -> dict[Any, Selected]:
        """Those leaves that can be pruned; what does not fit is said before anything is computed."""
        chosen = self._choose(follow_leaves(graph, selected), selected)
        return {path: selected[path] for path in chosen}

    def _choose(
        self, followed: FollowedLeaves, selected: dict[Any, Selected]
    ) -> list[tree_lib.Path]:
        if any(leaf.mask is not None for leaf in selected.values()):
            check_used(followed, type(self).__name__)
            warn_of_unclear(followed.unclear, 'are masked, and nothing makes up for what they lose')
            return list(followed.matrices)
        chosen = choose_leaves(followed, names_of(self), type(self).__name__)
        for path in chosen:
            for matrices in followed.matrices[path]:
                selected[path].check(path, matrices)
        return chosen

    def _check_reconstructs(self) -> None:
        if type(self).reconstruct_matrices is CalibratedPruning.reconstruct_matrices:
            raise ValueError(
                f'{type(self).__name__} changes no weight that stays, so that masks=… would merely be applied: choose '
                'sparsegpt, or jaxpruner.FixedMask(masks)'
            )
        if self.owl:
            raise ValueError(
                'owl=True chooses sparsities, which masks=… have already; leave one out'
            )

    def _result(
        self, pruned: PrunedLeaves, given: dict[Any, jax.Array]
    ) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
        return (
            given_masks.apply_masks(pruned.params, given)
            if given
            else (pruned.params, pruned.masks)
        )

    def _with_statistics(
        self, calibration: Calibration, selected: dict[Any, Selected]
    ) -> dict[Any, Selected]:
        """Those leaves of which statistics are given; says of others why they stay dense."""
        followed = getattr(calibration, 'followed', None)
        chosen = [path for path in selected if path in calibration]
        if followed is not None:
            chosen = self._choose(followed.among(selected), selected)
        known = {*chosen, *(followed.paths if followed is not None else ())}
        missing = [tree_lib.path_string(path) for path in selected if path not in known]
        if missing:
            caller_warnings.warn(
                f'{", ".join(missing)}: the calibration has no statistics of these leaves, which stay dense; calibrate '
                'without only=…, or leave them out of sparsity_distribution_fn'
            )
        return {path: selected[path] for path in chosen}
