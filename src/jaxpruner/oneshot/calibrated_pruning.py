"""The base of pruners that calibrate a model on some batches, then prune it once."""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import base_updater, caller_warnings, checks, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import FixedMask
from jaxpruner.explicit_meshes import on_explicit_mesh
from jaxpruner.oneshot import batches as batches_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.calibrate import (
    CalibratedMatrices,
    Calibration,
    InputStatistics,
    SampleWeights,
    calibrate,
)
from jaxpruner.oneshot.matrices import WeightMatrices, check_matrix_type
from jaxpruner.oneshot.owl import Names, matrix_sparsities
from jaxpruner.oneshot.sequential import SequentialCalibration
from jaxpruner.plan import PruningPlan
from jaxpruner.progress import progress_bar
from jaxpruner.sparse_state import MASK_DTYPE
from jaxpruner.sparsity_types import INPUT_AXIS, NByM, check_groups, normalize_setting

_NOTE = (
    'The model decides which of them: leaves that no contraction reads stay dense, and N:M lies along the inputs. '
    'plan(params, apply_fn=…, batches=…) shows both.'
)


_MOST_NAMED = 5  # leaves in a warning


class LeafTarget(NamedTuple):
    """What a leaf is to reach: a share to remove as a sparsity type says, or a mask in the leaf's shape."""

    sparsity: Any
    sparsity_type: sparsity_types.SparsityType
    mask: jax.Array | None = None


LeafTargets = dict[tree_lib.Path, LeafTarget]


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

    def doubt(self, prepared: Any) -> str | None:
        """Tells what there is to warn of in what `prepare` made, with `{names}` for the leaves; `None` for nothing."""
        del prepared

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses all but unstructured and N:M, and OWL with N:M, which leaves no choice of a sparsity."""
        if isinstance(sparsity_type, NByM) and self.owl:
            raise ValueError(
                f'{where}owl=True chooses sparsities, which {sparsity_type!r} sets; leave one out'
            )
        if not isinstance(sparsity_type, NByM):
            check_matrix_type(sparsity_type, (), where.removesuffix(': '))

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
        model: Any = apply_fn
        data: Any = batches
        selected = self._selected(params, masks)
        if calibration is None:
            name, instead = type(self).__name__, ', or a calibration=…'
            batches_lib.check_model_is_given(name, 'instant_sparsify', apply_fn, batches, instead)
            first, data = batches_lib.first_batch(data)
            graph = leaves_lib.trace_model(model, params, first)
            followed = leaves_lib.follow_leaves(graph, selected)
            del graph  # holds the traced program
        elif weights is not None:
            raise ValueError('a calibration is weighed already: give the weights to calibrate')
        elif self.sequential:
            raise ValueError(
                'sequential=True takes statistics as it goes; give apply_fn and batches alone'
            )
        elif not isinstance(calibration, Calibration):
            raise TypeError(
                f'calibration must be what jaxpruner.oneshot.calibrate returns, got {type(calibration).__name__}'
            )
        else:
            for path, leaf in zip(*tree_lib.flatten_with_paths(params)[:2], strict=True):
                shape = calibration.shapes.get(path, leaf.shape)
                if path in selected and shape != leaf.shape:
                    raise ValueError(
                        f'{tree_lib.path_string(path)}: the calibration is of parameters of shape {shape}, got '
                        f'{leaf.shape}; calibrate the parameters that are pruned'
                    )
            followed = calibration.followed.among(selected)
            unknown = set(selected) - followed.matrices.keys() - followed.reasons.keys()
            if unknown:
                caller_warnings.warn(
                    f'{", ".join(map(tree_lib.path_string, sorted(unknown)))}: the calibration has no statistics of '
                    'these leaves, which stay dense; calibrate without only=…, or leave them out of '
                    'sparsity_distribution_fn'
                )
        targets = self._targets(params, followed, masks)
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
        described = self.describe_leaves(*tree_lib.flatten_with_paths(params)[:2])
        types = {leaf.path: _along_inputs(leaf.sparsity_type) for leaf in described}
        if apply_fn is None and batches is None:
            plan = base_updater.BaseUpdater.plan(leaves_lib.with_types(self, types), params)
            return dataclasses.replace(plan, note=_NOTE if plan.pruned else '')
        batches_lib.check_model_is_given(type(self).__name__, 'plan', apply_fn, batches)
        first, _ = batches_lib.first_batch(batches)
        graph = leaves_lib.trace_model(apply_fn, params, first)
        followed = leaves_lib.follow_leaves(graph, self._selected(params))
        targets = self._targets(params, followed)
        why_dense = {}
        for leaf in described:
            if leaf.path in targets:
                with contextlib.suppress(ValueError):  # parts of it are summed along several axes
                    leaf = dataclasses.replace(leaf, sparsity_type=types[leaf.path])
                    types[leaf.path] = leaves_lib.type_along_inputs(leaf, graph)
            elif reason := followed.why_dense(leaf.path, lambda path: False):
                why_dense[leaf.path] = reason
        with caller_warnings.silence():
            planned = base_updater.BaseUpdater.plan(leaves_lib.with_types(self, types), params)
        leaves = []
        for leaf in leaves_lib.with_reasons(planned, why_dense):
            kind = leaf.sparsity_type
            if leaf.is_pruned and isinstance(kind, NByM) and kind.axis != INPUT_AXIS:
                length = kind.line_length(leaf.shape)
                kept = leaf.size // max(length, 1) * kind.kept_in_line(length)
                leaf = dataclasses.replace(leaf, kept=kept)
            leaves.append(leaf)
        counts = [leaf.kept for leaf in leaves]
        kept = None if None in counts else sum(counts)
        return dataclasses.replace(planned, leaves=tuple(leaves), kept=kept)

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Returns the target of each leaf; its sparsity type is checked when it is known how the leaf is used."""
        params = tree_lib.as_arrays(params)
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        described = self.describe_leaves(paths, leaves)

        def check(pruned: Sequence[sparsity_types.Leaf]) -> None:
            for leaf in pruned:
                assert leaf.sparsity_type is not None
                self.check_type(leaf.sparsity_type, f'{leaf.name}: ')

        with leaves_lib.ignore_vectors():
            targets = checks.targets_of_leaves(
                self.distribution(), params, described, self.stacked, check
            )
        return tree_lib.unflatten(treedef, targets, leaves)

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refuses: masks are made once, from batches that an optimizer does not see."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, apply_fn=…, '
            'batches=…), then FixedMask(masks).wrap_optax(tx) to fine-tune'
        )

    def _selected(
        self, params: tree_lib.PyTree, masks: tree_lib.PyTree | None = None
    ) -> list[tree_lib.Path]:
        """Lists the leaves that the distribution selects, or that have masks from elsewhere."""
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        if masks is None:
            return leaves_lib.selected_leaves(self, params)
        if type(self).reconstruct_matrices is CalibratedPruning.reconstruct_matrices:
            raise ValueError(
                f'{type(self).__name__} changes no weight that stays, so that masks=… would merely be applied: '
                'choose sparsegpt, or jaxpruner.FixedMask(masks)'
            )
        if self.owl:
            raise ValueError(
                'owl=True chooses sparsities, which masks=… have already; leave one out'
            )
        given = tree_lib.leaves_like(treedef, masks)
        for path, leaf, mask in zip(paths, leaves, given, strict=True):
            if mask is not None and jnp.shape(mask) != jnp.shape(leaf):
                raise ValueError(
                    f'{tree_lib.path_string(path)}: its mask has shape {jnp.shape(mask)}, and the parameter '
                    f'{jnp.shape(leaf)}; give masks unpacked, in the shapes of the parameters'
                )
        return [path for path, mask in zip(paths, given, strict=True) if mask is not None]

    def _targets(
        self,
        params: tree_lib.PyTree,
        followed: leaves_lib.FollowedLeaves,
        masks: tree_lib.PyTree | None = None,
    ) -> LeafTargets:
        """Finds what each leaf is to reach that can be pruned; says of the others why they stay dense."""
        name = type(self).__name__
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        if masks is not None:
            leaves_lib.check_used(followed, name)
            consequence = 'are masked, and nothing makes up for what they lose'
            leaves_lib.warn_of_unclear(followed.unclear, consequence)
            targets = {}
            for path, mask in zip(paths, tree_lib.leaves_like(treedef, masks), strict=True):
                if path in followed.matrices:
                    mask = jnp.asarray(mask, jnp.float32)
                    targets[path] = LeafTarget(0.0, sparsity_types.Unstructured(), mask)
            return targets
        for names in self.blocks or ():
            tree_lib.check_names(tree_lib.as_names(names), paths, 'blocks')
        chosen = leaves_lib.choose_leaves(followed, leaves_lib.names_of(self), name)
        described = self.describe_leaves(paths, leaves)
        types: dict[tree_lib.Path, Any] = {
            leaf.path: leaf.sparsity_type for leaf in described if leaf.path in chosen
        }
        pruner = leaves_lib.with_types(self, types)
        sparsities = tree_lib.leaves_like(treedef, pruner.get_target_sparsities(params))
        targets = dict(zip(paths, sparsities, strict=True))

        def check(path: tree_lib.Path) -> None:
            for part in followed.matrices[path]:
                shape = part.layout.matrices_shape
                check_matrix_type(types[path], shape, tree_lib.path_string(path))

        of_leaves = {path: functools.partial(check, path) for path in chosen}
        check_groups(of_leaves, normalize_setting(self.sparsity_type))
        return {path: LeafTarget(targets[path], types[path]) for path in chosen}

    def _prune_in_blocks(
        self,
        run: 'PruningRun',
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

    def _choose_sparsities(self, run: 'PruningRun', entries: list[CalibratedMatrices]) -> None:
        if self.owl and entries:
            sparsities = matrix_sparsities(entries, run.targets, run.read, self)
            for (matrices, _), sparsity in zip(entries, sparsities, strict=True):
                run.sparsities[matrices.path, matrices.reading] = sparsity


def _along_inputs(sparsity_type: Any) -> Any:
    if not isinstance(sparsity_type, NByM):
        return sparsity_type
    return dataclasses.replace(sparsity_type, axis=INPUT_AXIS)


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
        # Warning -> the leaves that it names.
        self._doubts: dict[str, list[str]] = collections.defaultdict(list)

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
            (first, statistics), *others = shared.pop(key)
            matrices = [first, *(part for part, _ in others)]
            is_unseen = np.asarray(jnp.all(statistics.second_moment == 0, -1))
            if is_unseen.any():
                statistics = _with_equal_inputs(statistics, is_unseen)
                for index, part in itertools.product(np.argwhere(is_unseen).tolist(), matrices):
                    number = f', matrix {", ".join(map(str, index))}' if index else ''
                    self._doubts[_UNSEEN].append(part.where + number)
            prepared = self.pruner.prepare(statistics)
            del statistics, others  # frees the statistics, unless they are what is prepared
            doubt = self.pruner.doubt(prepared)
            for part in matrices:
                self._prune(part, prepared)
                if doubt is not None:
                    self._doubts[doubt].append(part.where)
            del prepared  # before the next statistics are prepared

    def warn(self) -> None:
        """Warns once of each kind of doubt about what was pruned."""
        for doubt, names in self._doubts.items():
            more = f' and {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''
            caller_warnings.warn(doubt.format(names=', '.join(names[:_MOST_NAMED]) + more))

    def _check(self, entry: CalibratedMatrices) -> None:
        """Refuses statistics that lack something or are not finite; notes leaves with too few samples."""
        matrices, statistics = entry
        where = tree_lib.path_string(matrices.path)
        if statistics.gram is None and self.pruner.kind == 'gram':
            raise ValueError(
                f"{where}: its statistics hold no Gram matrix; calibrate with kind='gram'"
            )
        if not jnp.isfinite(statistics.second_moment).all():
            raise ValueError(
                f'{where}: its inputs are not finite; look for NaN or inf in the batches and in the model'
            )
        counts = np.asarray(statistics.count, np.float64)
        samples = float(np.min(counts[counts > 0], initial=np.inf))  # zero has a warning of its own
        inputs = matrices.shape[-2]
        if samples < inputs:
            self._doubts[_FEW_SAMPLES].append(f'{where} ({samples:g} samples, {inputs} inputs)')

    def _prune(self, matrices: WeightMatrices, prepared: Any) -> None:
        path, where = matrices.path, matrices.where
        target = self.targets[path]
        weights = self.read(matrices)
        if bool(jnp.isnan(weights).any()):
            self._doubts[_NAN].append(where)
        if target.mask is not None:
            mask = self.read(matrices, target.mask)
            new, kept = self.pruner.reconstruct_matrices(weights, prepared, mask)
        else:
            sparsity = self.sparsities.get((path, matrices.reading), target.sparsity)
            sparsity = jnp.asarray(sparsity, jnp.float32)
            if matrices.layer is not None and sparsity.ndim:
                sparsity = sparsity[matrices.layer]
            new, kept = self.pruner.prune_matrices(
                weights, prepared, sparsity, target.sparsity_type, where
            )
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


_FEW_SAMPLES = (
    'samples are fewer than inputs, so that what they say of these is uncertain: {names}; calibrate with at least as '
    'many samples as inputs'
)
_UNSEEN = (
    'the inputs of these matrices are zero in all batches, so that their weights are ranked as if all inputs were '
    'alike: {names}; give batches that reach them, or leave the leaves dense'
)
_NAN = (
    'these leaves hold NaN, which ranks lowest and is removed first: {names}; look for what went wrong when they were '
    'trained, or leave them dense'
)


def _with_equal_inputs(statistics: InputStatistics, is_unseen: np.ndarray) -> InputStatistics:
    """Lets the inputs of these matrices, which never occur, be independent and of one size."""
    second_moment = jnp.where(is_unseen[..., None], 1, statistics.second_moment)
    gram = statistics.gram
    if gram is not None:
        gram = jnp.where(is_unseen[..., None, None], jnp.eye(gram.shape[-1]), gram)
    return statistics._replace(second_moment=second_moment, gram=gram)
