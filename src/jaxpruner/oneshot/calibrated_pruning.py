"""The base of pruners that calibrate a model on some batches, then prune it once."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, caller_warnings, checks, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import FixedMask
from jaxpruner.oneshot import batches as batches_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.calibrate import CalibratedMatrices, Calibration, InputStatistics, calibrate
from jaxpruner.oneshot.matrix_masks import check_matrix_type
from jaxpruner.oneshot.owl import Names, matrix_sparsities
from jaxpruner.oneshot.pruning_run import LeafTarget, LeafTargets, PruningRun
from jaxpruner.oneshot.sample_weights import SampleWeights
from jaxpruner.oneshot.sequential import SequentialCalibration
from jaxpruner.plan import LeafPlan, PruningPlan
from jaxpruner.progress import progress_bar
from jaxpruner.sparsity_types import INPUT_AXIS, NByM, check_groups, normalize_setting
from jaxpruner.trace import with_input_axes

_NOTE = (
    'The model decides which of them: leaves that no contraction reads stay dense, and N:M lies along the inputs. '
    'plan(params, apply_fn=…, batches=…) shows both.'
)


@dataclasses.dataclass
class CalibratedPruning(base_updater.BaseUpdater):
    """Base of the pruners that look at what the inputs of each weight matrix are.

    Leaves that the distribution selects and that are contracted with data are pruned; all others (embeddings that are
    looked up, biases, norms) stay dense. Masks are made once: to fine-tune with them, use `FixedMask`.

    Sequential pruning and OWL divide leaves into blocks. A block holds

    - the leaves that one entry of `blocks` names;
    - of the others, the leaves in one trip of a scan;
    - of the rest, leaves with the same input if sequential, and leaves with the same numbered path prefix for OWL.

    A subclass defines `prune_matrices`, and may override the other methods before `instant_sparsify`.

    Attributes:
      per: what is ranked together where unstructured. `'output'`: the weights of one output. `'layer'`: all weights of
        one matrix.
      owl: blocks with many outliers stay denser; the mean over all weights stays what the distribution says.
      owl_per: what has one sparsity with OWL: a `'block'` (all matrices of a transformer's layer, as published), or a
        `'leaf'` (each matrix of a stack).
      owl_multiple: an outlier exceeds this multiple of the mean score of its block.
      owl_deviation: how far a block's sparsity may be from the mean.
      sequential: take the statistics of a block when the blocks before it have been pruned, so that only its own take
        memory. Each block is run twice. All batches are kept in memory, as activations between two blocks.
      blocks: a glob or a list of globs for each block, such as `['layer_0/*', 'layer_1/*']`.

    Raises:
      TypeError, ValueError: a setting is wrong.

    >>> CalibratedPruning(sparsity_type='2:4').per
    'output'
    """

    # Which statistics are taken, `'second_moment'` or `'gram'`.
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

    # What an algorithm overrides.

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

    def prepare(self, statistics: InputStatistics) -> Any:
        """Makes of statistics what the other hooks get: any pytree of arrays, made once for leaves that share them.

        Those of a stack have an axis of the layers first, as in the statistics.
        """
        return statistics

    def begin(self, params: tree_lib.PyTree, targets: LeafTargets) -> 'CalibratedPruning':
        """Looks at a model before any of it is pruned; returns the pruner to go on with, mostly itself.

        Args:
          params: the parameters.
          targets: what the leaves that are to be pruned are to reach, by path.
        """
        del params, targets
        return self

    def doubt(self, prepared: Any, where: str) -> str | None:
        """Tells what there is to warn of in what `prepare` made for a leaf, `None` for nothing."""
        del prepared, where

    def warn_of_doubts(self, doubts: Sequence[str]) -> None:
        """Warns once, at the end, of all that `doubt` returned."""
        del doubts

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses all but unstructured and N:M, and OWL with N:M, which leaves no choice of a sparsity."""
        if isinstance(sparsity_type, NByM):
            if self.owl:
                raise ValueError(
                    f'{where}owl=True chooses sparsities, which {sparsity_type!r} sets; leave one out'
                )
        elif not sparsity_types.is_unstructured(sparsity_type):
            raise TypeError(
                f'{where}calibrated pruning is unstructured or N:M, got {sparsity_type!r}'
            )

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
          donate: free each array of `params` as soon as it is pruned, where there is no memory for another copy: such
            arrays can no longer be used, not even after an error.
          weights: `batch -> array`, how much each sample counts, as in `calibrate`.
          **extra_args: not used.

        Returns:
          The pruned parameters, and the (unpacked) masks.

        Raises:
          ValueError: sparsities or shapes do not fit, or what it takes to calibrate is missing.
          UnsupportedPrimitive: a selected leaf goes through an operation that is not understood.
        """
        del grads, extra_args
        name = type(self).__name__
        model: Any = apply_fn
        data: Any = batches
        targets, contradictions = self._targets(params, masks)
        if calibration is not None:
            if weights is not None:
                raise ValueError('a calibration is weighed already: give the weights to calibrate')
            if self.sequential:
                raise ValueError(
                    'sequential=True takes statistics as it goes; give apply_fn and batches alone'
                )
            followed = getattr(calibration, 'followed', None)
            if followed is None:  # a mapping of a user's own
                parts = {path: tuple(part for part, _ in calibration[path]) for path in calibration}
                followed = leaves_lib.FollowedLeaves(parts, {}, frozenset())
            followed = followed.among(targets)
            unknown = targets.keys() - followed.matrices.keys() - followed.reasons.keys()
            if missing := [tree_lib.path_string(path) for path in targets if path in unknown]:
                caller_warnings.warn(
                    f'{", ".join(missing)}: the calibration has no statistics of these leaves, which stay dense; '
                    'calibrate without only=…, or leave them out of sparsity_distribution_fn'
                )
        else:
            instead = ', or a calibration=…'
            batches_lib.check_model_is_given(name, 'instant_sparsify', apply_fn, batches, instead)
            first, data = batches_lib.first_batch(batches)
            graph = leaves_lib.trace_model(model, params, first)
            followed = leaves_lib.follow_leaves(graph, targets)
            del graph  # holds the traced program
        targets = self._choose(params, followed, targets, contradictions)
        run = PruningRun(self.begin(params, targets), params, targets, donate)
        taken = self.kind, list(targets), progress, weights
        if self.sequential:
            self._prune_in_blocks(run, model, list(data), *taken)
        else:
            if calibration is None:
                calibration = calibrate(model, params, data, *taken)
            entries = [entry for path in targets for entry in calibration[path]]
            del calibration  # the statistics are freed one after another
            self._choose_sparsities(run, entries)
            run.prune(entries)
        run.warn()
        if masks is not None:  # also in parts of leaves that no weight matrix holds
            return FixedMask(masks).instant_sparsify(run.params)
        checks.check_masks(self, params, run.masks)
        return run.params, run.masks

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

        >>> params = {'kernel': jnp.ones((8, 4)), 'bias': jnp.ones((1, 4))}
        >>> apply_fn = lambda params, x: x @ params['kernel'] + params['bias']
        >>> plan = CalibratedPruning(sparsity_type='2:4').plan(params, apply_fn=apply_fn, batches=[jnp.ones((1, 8))])
        >>> plan['kernel'].sparsity_type.axis, plan['bias'].why_dense
        (-2, 'no contraction reads it')
        """
        del opt_state
        if apply_fn is None and batches is None:
            plan = super().plan(params)
            leaves = [_along_inputs(leaf) if leaf.is_pruned else leaf for leaf in plan]
            note = _NOTE if plan.pruned else ''
            return dataclasses.replace(plan, leaves=tuple(leaves), note=note)
        batches_lib.check_model_is_given(type(self).__name__, 'plan', apply_fn, batches)
        with caller_warnings.silence():  # which leaves are pruned is not known yet
            plan = super().plan(params)
        targets, contradictions = self._targets(params)
        first, _ = batches_lib.first_batch(batches)
        graph = leaves_lib.trace_model(apply_fn, params, first)
        followed = leaves_lib.follow_leaves(graph, targets)
        targets = self._choose(params, followed, targets, contradictions)
        leaves = []
        for leaf, array in zip(plan, tree_lib.flatten_with_paths(params)[1], strict=True):
            if leaf.is_pruned and leaf.path not in targets:
                reason = followed.why_dense(leaf.path, lambda path: False)
                leaf = dataclasses.replace(leaf, target=None, kept=leaf.size, why_dense=reason)
            elif leaf.is_pruned and isinstance(leaf.sparsity_type, NByM):
                n_by_m = dataclasses.replace(leaf.sparsity_type, axis=INPUT_AXIS)
                removed = 0
                for part in followed.matrices[leaf.path]:
                    *_, inputs, _ = part.shape
                    lines = math.prod(part.shape) // max(inputs, 1)
                    removed += lines * (inputs - n_by_m.kept_in_line(inputs))
                # Inputs of several readings may lie along several axes.
                with contextlib.suppress(ValueError):
                    axis_of = with_input_axes(lambda path, leaf, n_by_m=n_by_m: n_by_m, graph)
                    n_by_m = axis_of(leaf.path, array) or n_by_m
                leaf = dataclasses.replace(leaf, sparsity_type=n_by_m, kept=leaf.size - removed)
            leaves.append(leaf)
        counts = [leaf.kept for leaf in leaves]
        kept = None if None in counts else sum(counts)
        return dataclasses.replace(plan, leaves=tuple(leaves), kept=kept)

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Returns the target of each leaf; its sparsity type is checked when it is known how the leaf is used."""
        _, leaves, treedef = tree_lib.flatten_with_paths(params)
        targets, contradictions = self._targets_and_contradictions(params)
        checks.warn_of_contradictions(contradictions)
        return tree_lib.unflatten(treedef, targets, leaves)

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refuses: masks are made once, from batches that an optimizer does not see."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, apply_fn=…, '
            'batches=…), then FixedMask(masks).wrap_optax(tx) to fine-tune'
        )

    def _targets_and_contradictions(self, params: tree_lib.PyTree) -> tuple[list[Any], list[Any]]:
        params = tree_lib.as_arrays(params)
        paths, leaves, _ = tree_lib.flatten_with_paths(params)
        described = self.describe_leaves(paths, leaves)

        def check(pruned: Sequence[sparsity_types.Leaf]) -> None:
            for leaf in pruned:
                assert leaf.sparsity_type is not None
                self.check_type(leaf.sparsity_type, f'{leaf.name}: ')

        with leaves_lib.ignore_vectors():
            return checks.targets_of_leaves(
                self.sparsity_distribution_fn, params, described, self.stacked, check
            )

    def _targets(
        self, params: tree_lib.PyTree, masks: tree_lib.PyTree | None = None
    ) -> tuple[LeafTargets, list[checks.Contradiction]]:
        """Finds the targets of the leaves that are selected, and shares that N:M contradicts."""
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        if masks is not None:
            if type(self).reconstruct_matrices is CalibratedPruning.reconstruct_matrices:
                raise ValueError(
                    f'{type(self).__name__} changes no weight that stays, so that masks=… would merely be applied: '
                    'choose sparsegpt, or jaxpruner.FixedMask(masks)'
                )
            if self.owl:
                raise ValueError(
                    'owl=True chooses sparsities, which masks=… have already; leave one out'
                )
            targets = {}
            given = tree_lib.leaves_like(treedef, masks)
            for path, leaf, mask in zip(paths, leaves, given, strict=True):
                if mask is not None and jnp.shape(mask) != jnp.shape(leaf):
                    raise ValueError(
                        f'{tree_lib.path_string(path)}: its mask has shape {jnp.shape(mask)}, and the parameter '
                        f'{jnp.shape(leaf)}; give masks unpacked, in the shapes of the parameters'
                    )
                if mask is not None:
                    mask = jnp.asarray(mask, jnp.float32)
                    targets[path] = LeafTarget(0.0, sparsity_types.Unstructured(), mask)
            return targets, []
        for names in self.blocks or ():
            tree_lib.check_names(tree_lib.as_names(names), paths, 'blocks')
        sparsities, contradictions = self._targets_and_contradictions(params)
        targets = {}
        for sparsity, leaf in zip(sparsities, self.describe_leaves(paths, leaves), strict=True):
            if sparsity is not None and leaf.sparsity_type is not None:
                targets[leaf.path] = LeafTarget(sparsity, leaf.sparsity_type)
        return targets, contradictions

    def _choose(
        self,
        params: tree_lib.PyTree,
        followed: leaves_lib.FollowedLeaves,
        targets: LeafTargets,
        contradictions: list[checks.Contradiction],
    ) -> LeafTargets:
        """Chooses the leaves that can be pruned, says of the others why they stay dense, and checks the shapes."""
        name = type(self).__name__
        if any(target.mask is not None for target in targets.values()):
            leaves_lib.check_used(followed, name)
            consequence = 'are masked, and nothing makes up for what they lose'
            leaves_lib.warn_of_unclear(followed.unclear, consequence)
            return {path: targets[path] for path in followed.matrices}
        chosen = leaves_lib.choose_leaves(followed, leaves_lib.names_of(self), name)
        checks.warn_of_contradictions([each for each in contradictions if each.leaf.path in chosen])

        def check(path: tree_lib.Path) -> None:
            for part in followed.matrices[path]:
                shape = part.layout.matrices_shape
                check_matrix_type(targets[path].sparsity_type, shape, tree_lib.path_string(path))

        of_leaves = {path: functools.partial(check, path) for path in chosen}
        paths, _, _ = tree_lib.flatten_with_paths(params)
        check_groups(of_leaves, normalize_setting(self.sparsity_type), paths)
        return {path: targets[path] for path in chosen}

    def _prune_in_blocks(
        self,
        run: PruningRun,
        apply_fn: Any,
        batches: list[Any],
        kind: str,
        only: Sequence[tree_lib.Path],
        progress: bool,
        weights: SampleWeights | None,
    ) -> None:
        """Prunes each block by statistics of the model in which those before it are pruned."""
        calibration = SequentialCalibration(
            apply_fn, run.params, batches, kind, only=only, blocks=self.blocks, weights=weights
        )
        if self.owl:
            dense = calibrate(
                apply_fn, run.params, batches, 'second_moment', only, progress, weights
            )
            self._choose_sparsities(run, [entry for path in dense for entry in dense[path]])
            del dense
        number_of_blocks = len(calibration.blocks)
        done = itertools.count(1)
        with progress_bar(number_of_blocks * len(batches), progress) as show:
            batches.clear()  # `calibration` now holds them
            for number in range(number_of_blocks):
                name = f'block {number + 1} of {number_of_blocks}'
                on_batch = lambda totals, name=name: show(name, next(done), totals)  # noqa: E731
                run.prune(calibration.take(number, run.params, on_batch))

    def _choose_sparsities(self, run: PruningRun, entries: list[CalibratedMatrices]) -> None:
        if self.owl and entries:
            sparsities = matrix_sparsities(entries, run.targets, run.read, self)
            for (matrices, _), sparsity in zip(entries, sparsities, strict=True):
                run.sparsities[matrices.path, matrices.reading] = sparsity


def _along_inputs(leaf: LeafPlan) -> LeafPlan:
    if not isinstance(leaf.sparsity_type, NByM):
        return leaf
    along_inputs = dataclasses.replace(leaf.sparsity_type, axis=INPUT_AXIS)
    return dataclasses.replace(leaf, sparsity_type=along_inputs)
