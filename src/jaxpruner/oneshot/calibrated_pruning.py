"""The base of pruners that calibrate a model on some batches, then prune it once."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import optax

from jaxpruner import base_updater, caller_warnings, checks, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import given_masks
from jaxpruner.oneshot.at_once_or_in_blocks import prune_at_once, prune_in_blocks
from jaxpruner.oneshot.batches import (
    as_inputs,
    check_inputs,
    check_model_is_given,
    check_samples,
    first_batch,
)
from jaxpruner.oneshot.blocks import Names
from jaxpruner.oneshot.calibrated_plan import (
    FollowedModel,
    with_model,
    with_reasons,
    without_model,
)
from jaxpruner.oneshot.calibration import Calibration, calibrate
from jaxpruner.oneshot.followed_leaves import follow_leaves, ignore_vectors
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.leaf_targets import (
    LeafTarget,
    LeafTargets,
    choose_calibrated,
    choose_targets,
    targets_of_masks,
)
from jaxpruner.oneshot.named_leaves import names_of
from jaxpruner.oneshot.owl_blocks import OwlSettings
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.pruning_run import PruningRun
from jaxpruner.oneshot.sample_weights import SampleWeights
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.plan import PruningPlan
from jaxpruner.sparsity_types import Leaf, check_groups, normalize_setting
from jaxpruner.trace import param_uses


@dataclasses.dataclass
class CalibratedPruning(base_updater.BaseUpdater):
    """Base of the pruners that look at what the inputs of each weight matrix are.

    Leaves that the distribution selects and that are contracted with data are pruned; all others (embeddings that are
    looked up, biases, norms) stay dense. Masks are made once: to fine-tune with them, use `FixedMask`.

    Sequential pruning and OWL divide leaves into blocks. A block holds

    - the leaves that one entry of `blocks` names;
    - of the others, the leaves in one trip of a scan;
    - of the rest, leaves with the same input if sequential, and leaves with the same numbered path prefix for OWL.

    Attributes:
      per: what is ranked together where unstructured. `'output'`: the weights of one output. `'layer'`: all weights of
        one matrix.
      owl: blocks with many outliers stay denser; the mean over all weights stays what the distribution says.
      owl_per: what has one sparsity with OWL: a `'block'` (all matrices of a transformer's layer, as published), or a
        `'leaf'` (each matrix of a stack).
      owl_multiple: an outlier exceeds this multiple of the mean score of its block.
      owl_deviation: how far a block's sparsity may be from the mean.
      sequential: take the statistics of a block when the blocks before it have been pruned, so that only its own take
        memory. Each block is run two or three times. All batches are kept in memory, as activations between two blocks.
      blocks: a glob or a list of globs for each block, such as `['layer_0/*', 'layer_1/*']`.

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
        uses_blocks = self.sequential or (self.owl and self.owl_per == 'block')
        if self.blocks is not None and not uses_blocks:
            raise ValueError(
                'blocks are for sequential=True, or for owl=True per block; set one of them, or no blocks'
            )
        checks.check_no_topk_fn(self, 'ranks weights itself')

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses all but unstructured and N:M, and OWL with N:M, which leaves no choice of a sparsity."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            if self.owl:
                raise ValueError(
                    f'{where}owl=True chooses sparsities, which {sparsity_type!r} sets; leave one out'
                )
        elif not sparsity_types.is_unstructured(sparsity_type):
            raise TypeError(
                f'{where}calibrated pruning is unstructured or N:M, got {sparsity_type!r}'
            )

    def begin(self, params: tree_lib.PyTree, targets: LeafTargets) -> None:
        """Looks at a model before any of it is pruned; most algorithms need not.

        Args:
          params: the parameters.
          targets: what the leaves that are to be pruned are to reach, by path.
        """
        del params, targets

    def prepare(self, statistics: InputStatistics, donate: bool) -> Any:
        """Makes of statistics what the other hooks get: any pytree of arrays, made once for leaves that share them.

        Those of a stack have an axis of the layers first, as in the statistics. `donate` is about the statistics, not
        about the parameters: nothing else holds them, and what is returned may take their memory.
        """
        del donate
        return statistics

    def prune_matrices(
        self,
        weights: jax.Array,
        prepared: Any,
        sparsity: Any,
        sparsity_type: sparsity_types.SparsityType,
        where: str,
    ) -> tuple[jax.Array | None, jax.Array]:
        """Prunes the weight matrices of a leaf. Arguments are given by position.

        Args:
          weights: `[..., inputs, outputs]`.
          prepared: what `prepare` made of the statistics of their inputs, such as SparseGPT's factors; by default the
            statistics.
          sparsity: a scalar, or one for each matrix.
          sparsity_type: unstructured, or N:M along the inputs.
          where: the leaf's path, for messages.

        Returns:
          New weights (`None` if those that are kept do not change), and the mask.
        """
        raise NotImplementedError(f'{type(self).__name__} must define prune_matrices')

    def reconstruct_matrices(
        self, weights: jax.Array, prepared: Any, mask: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]:
        """Changes the weights that a mask from elsewhere keeps, to make up for the others; SparseGPT alone does.

        Arguments and results are those of `prune_matrices`; the mask has the weights' shape.
        """
        raise NotImplementedError(f'{type(self).__name__} must define reconstruct_matrices')

    def doubt(self, prepared: Any, where: str) -> str | None:
        """Tells what there is to warn of in what `prepare` made for a leaf, `None` for nothing."""
        del prepared, where

    def warn_of_doubts(self, doubts: Sequence[str]) -> None:
        """Warns once, at the end, of all that `doubt` returned."""
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
        weights: SampleWeights | None = None,
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
          weights: `batch -> array`, how much each sample counts, as in `calibrate`.
          **extra_args: not used.

        Returns:
          The pruned parameters, and the (unpacked) masks.

        Raises:
          ValueError: sparsities or shapes do not fit, or what it takes to calibrate is missing.
          UnsupportedPrimitive: a selected leaf goes through an operation that is not understood.
        """
        del grads, extra_args
        masks_by_path = {}
        if masks is None:
            targets = self._targets(params)
        else:
            self._check_reconstructs()
            masks_by_path = given_masks.check_masks(params, masks)
            targets = targets_of_masks(masks_by_path)
        leaves = PrunedLeaves(params, donate)
        if calibration is not None:
            if weights is not None:
                raise ValueError('a calibration is weighed already: give the weights to calibrate')
            self._prune_by(calibration, leaves, targets)
        else:
            check_model_is_given(
                type(self).__name__, 'instant_sparsify', apply_fn, batches, ', or a calibration=…'
            )
            assert apply_fn is not None
            assert batches is not None
            first, batches = first_batch(batches)
            # Keep only the targets: the graph holds the traced program, and is freed here.
            chosen = self._follow(apply_fn, first, params, targets).targets
            self.begin(params, chosen)
            run = PruningRun(self, leaves, chosen)
            self._calibrate_and_prune(run, apply_fn, batches, progress, weights)
        if masks_by_path:
            return given_masks.apply_masks(leaves.params, masks_by_path)
        made = leaves.masks
        checks.check_masks(self, params, made)
        return leaves.params, made

    def plan(
        self,
        params: tree_lib.PyTree,
        opt_state: Any = None,
        *,
        apply_fn: Callable[..., Any] | None = None,
        batches: Iterable[Any] | None = None,
    ) -> PruningPlan:
        """Tells what will happen to each leaf; the model says which leaves are pruned, and along which axes.

        Nothing is computed on a device. Without a model the plan is an upper bound, and its note says so.

        Args:
          params: the parameters, or their shapes.
          opt_state: not read; pruning once leaves no state to go on with.
          apply_fn: `(params, *inputs) -> results`, the model.
          batches: an iterable of inputs, of which the first one's shapes are looked at; an iterator is then one
            further.

        Raises:
          ValueError: sparsities or shapes do not fit, or one of model and batches is missing.

        >>> import jax.numpy as jnp
        >>> params = {'kernel': jnp.ones((8, 4)), 'bias': jnp.ones((1, 4))}
        >>> apply_fn = lambda params, x: x @ params['kernel'] + params['bias']
        >>> plan = CalibratedPruning(sparsity_type='2:4').plan(params, apply_fn=apply_fn, batches=[jnp.ones((1, 8))])
        >>> plan['kernel'].sparsity_type.axis, plan['bias'].why_dense
        (-2, 'no contraction reads it')
        """
        del opt_state
        if apply_fn is None and batches is None:
            return without_model(self._plan_without_model(params))
        check_model_is_given(type(self).__name__, 'plan', apply_fn, batches)
        assert apply_fn is not None
        assert batches is not None
        with caller_warnings.silence():  # which leaves are pruned is not known yet
            plan = self._plan_without_model(params)
        first, _ = first_batch(batches)
        model = self._follow(apply_fn, first, params, self._targets(params))
        _, arrays, _ = tree_lib.flatten_with_paths(params)
        return with_model(plan, model, arrays)

    def _plan_without_model(self, params: tree_lib.PyTree) -> PruningPlan:
        return with_reasons(super().plan(params), self.why_dense(params))

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Returns the target of each leaf; its sparsity type is checked when it is known how the leaf is used."""
        _, leaves, treedef = tree_lib.flatten_with_paths(params)
        targets, contradictions = self._targets_and_contradictions(params)
        checks.warn_of_contradictions(contradictions)
        return tree_lib.unflatten(treedef, targets, leaves)

    def _targets_and_contradictions(
        self, params: tree_lib.PyTree
    ) -> tuple[list[Any], list[checks.Contradiction]]:
        params = tree_lib.as_arrays(params)
        paths, leaves, _ = tree_lib.flatten_with_paths(params)

        def check(pruned: Sequence[Leaf]) -> None:
            for leaf in pruned:
                assert leaf.sparsity_type is not None
                self.check_type(leaf.sparsity_type, f'{leaf.name}: ')

        with ignore_vectors():
            return checks.targets_of_leaves(
                self.sparsity_distribution_fn,
                params,
                self.describe_leaves(paths, leaves),
                self.stacked,
                check,
            )

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refuses: masks are made once, from batches that an optimizer does not see."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, apply_fn=…, '
            'batches=…), then FixedMask(masks).wrap_optax(tx) to fine-tune'
        )

    def _targets(self, params: tree_lib.PyTree) -> LeafTargets:
        """Finds the targets of the leaves that the distribution selects."""
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        _, contradictions = self._targets_and_contradictions(params)
        with caller_warnings.silence():  # until it is known which leaves are pruned
            sparsities = tree_lib.leaves_like(treedef, self.get_target_sparsities(params))
        contradiction_of = {each.leaf.path: each for each in contradictions}
        for names in self.blocks or ():
            names = (names,) if isinstance(names, str) else names
            tree_lib.check_names(names, paths, 'blocks')
        targets = {}
        for i, leaf in enumerate(self.describe_leaves(paths, leaves)):
            if sparsities[i] is not None and leaf.sparsity_type is not None:
                contradiction = contradiction_of.get(leaf.path)
                target = LeafTarget(sparsities[i], leaf.sparsity_type, contradiction=contradiction)
                targets[leaf.path] = target
        return targets

    def _prune_by(
        self, calibration: Calibration, leaves: PrunedLeaves, targets: LeafTargets
    ) -> None:
        """Prunes by statistics that a caller holds."""
        if self.sequential:
            raise ValueError(
                'sequential=True takes statistics as it goes; give apply_fn and batches alone'
            )
        targets = choose_calibrated(calibration, targets, names_of(self), type(self).__name__)
        matrices = {path: [entry.matrices for entry in calibration[path]] for path in targets}
        self._check_groups(matrices, targets, leaves.params)
        self.begin(leaves.params, targets)
        run = PruningRun(self, leaves, targets)
        prune_at_once(run, calibration, self._owl_settings(), owns_statistics=False)

    def _follow(
        self,
        apply_fn: Callable[..., Any],
        first: Any,
        params: tree_lib.PyTree,
        targets: LeafTargets,
    ) -> FollowedModel:
        """Finds the leaves that the model contracts with data, by its first batch, before anything is computed."""
        check_samples(first, 0)
        check_inputs(apply_fn, first, params=params)
        graph = param_uses(apply_fn, params, *as_inputs(first))
        followed = follow_leaves(graph, targets)
        targets = choose_targets(followed, targets, names_of(self), type(self).__name__)
        self._check_groups(followed.matrices, targets, params)
        return FollowedModel(graph, followed, targets)

    def _check_groups(
        self,
        matrices: Mapping[tree_lib.Path, Sequence[WeightMatrices]],
        targets: LeafTargets,
        params: tree_lib.PyTree,
    ) -> None:
        """Refuses N:M of which m does not divide the inputs, of all leaves at once."""
        paths, _, _ = tree_lib.flatten_with_paths(params)
        checks = {}
        for path, target in targets.items():
            checks[path] = functools.partial(target.check, matrices[path])
        check_groups(checks, normalize_setting(self.sparsity_type), paths)

    def _calibrate_and_prune(
        self,
        run: PruningRun,
        apply_fn: Callable[..., Any],
        batches: Iterable[Any],
        progress: bool,
        weights: SampleWeights | None,
    ) -> None:
        owl = self._owl_settings()
        if self.sequential:
            prune_in_blocks(
                run,
                apply_fn,
                list(batches),
                blocks=self.blocks,
                owl=owl,
                progress=progress,
                weights=weights,
            )
            return
        params = run.leaves.params
        only = list(run.targets)
        # Given as an argument alone: no variable here keeps the statistics from being freed.
        prune_at_once(
            run,
            calibrate(apply_fn, params, batches, self.kind, only, progress, weights),
            owl,
            owns_statistics=True,
        )

    def _owl_settings(self) -> OwlSettings | None:
        if not self.owl:
            return None
        return OwlSettings(self.owl_per, self.blocks or (), self.owl_multiple, self.owl_deviation)

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
