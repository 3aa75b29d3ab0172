"""The base of pruners that calibrate a model on some batches, then prune it once."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import base_updater, caller_warnings, checks, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import on_explicit_mesh
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.calibrate import (
    CalibratedMatrices,
    Calibration,
    InputStatistics,
    SampleWeights,
    SequentialCalibration,
    take_statistics,
)
from jaxpruner.oneshot.matrices import WeightMatrices, check_ranking
from jaxpruner.oneshot.owl import matrix_sparsities
from jaxpruner.plan import PruningPlan
from jaxpruner.progress import progress_bar
from jaxpruner.sparse_state import MASK_DTYPE
from jaxpruner.sparsity_types import NByM
from jaxpruner.trace.compiled_once import CompiledOnce

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

    A subclass defines `prune_matrices`.

    Attributes:
      per: what is ranked together where unstructured. `'output'`: the weights of one output. `'layer'`: all weights of
        one matrix.
      owl: blocks with many outliers stay denser; the mean over all weights stays what the distribution says.
      owl_per: what has one sparsity with OWL: a `'block'` (all matrices of a transformer's layer, as published), or a
        `'leaf'` (each matrix of a stack).
      owl_multiple: an outlier exceeds this multiple of the mean score of its block.
      owl_deviation: how far a block's sparsity may be from the mean.
      sequential: take the statistics of a block when the blocks before it have been pruned, so that only its own take
        memory. Each block is run twice. All batches, of one shape, are kept in memory, as activations between two
        blocks.
      blocks: a glob or a list of globs for each block, such as `['layer_0/*', 'layer_1/*']`.

    Raises:
      TypeError, ValueError: a setting is wrong.

    >>> CalibratedPruning(sparsity_type='2:4').per
    'output'
    """

    # Which statistics are taken, `'second_moment'` or `'gram'`.
    kind: ClassVar[str] = 'second_moment'
    ranked_together: ClassVar[str] = 'other'
    finds_input_axes: ClassVar[bool] = True

    per: str = 'output'
    owl: bool = False
    owl_per: str = 'block'
    owl_multiple: float = 5.0
    owl_deviation: float = 0.08
    sequential: bool = False
    blocks: Sequence[leaves_lib.Names] | None = None

    def __post_init__(self):
        super().__post_init__()
        uses_blocks = self.sequential or (self.owl and self.owl_per == 'block')
        if self.blocks is not None and not uses_blocks:
            raise ValueError(
                'blocks are for sequential=True, or for owl=True per block; set one of them, or no blocks'
            )
        checks.check_no_topk_fn(self, 'ranks weights itself')

    def prune_matrices(
        self,
        weights: jax.Array,
        statistics: InputStatistics,
        sparsity: Any,
        sparsity_type: sparsity_types.SparsityType,
        where: str,
    ) -> tuple[jax.Array | None, jax.Array]:
        """Prunes the weight matrices of a leaf. Arguments are given by position.

        Args:
          weights: `[..., inputs, outputs]`.
          statistics: of their inputs.
          sparsity: a scalar, or one for each matrix.
          sparsity_type: unstructured, or N:M along the inputs.
          where: the leaf's path, for messages.

        Returns:
          New weights (`None` if those that are kept do not change), and the mask.
        """
        raise NotImplementedError(f'{type(self).__name__} must define prune_matrices')

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses all but unstructured and N:M, and OWL with N:M, which leaves no choice of a sparsity."""
        check_ranking(sparsity_type, self.per, 0, where.removesuffix(': '))
        if self.owl and isinstance(sparsity_type, NByM):
            raise ValueError(
                f'{where}owl=True chooses sparsities, which {sparsity_type!r} sets; leave one out'
            )

    def instant_sparsify(
        self,
        params: tree_lib.PyTree,
        grads: None = None,
        *,
        apply_fn: Callable[..., Any] | None = None,
        batches: Iterable[Any] | None = None,
        calibration: Calibration | None = None,
        progress: bool = True,
        weights: SampleWeights | None = None,
    ) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
        """Calibrates the model and prunes it to the target sparsities.

        Args:
          params: any pytree of arrays.
          grads: not used.
          apply_fn: `(params, *inputs) -> results`, the model.
          batches: any iterable of batches: a tuple holds the inputs, anything else is the only input.
          calibration: statistics from `calibrate` with the same model and parameters, instead of the two.
          progress: show a progress bar, if stderr is a terminal and rich is installed.
          weights: `batch -> array`, how much each sample counts, as in `calibrate`.

        Returns:
          The pruned parameters, and the (unpacked) masks.

        Raises:
          ValueError: sparsities or shapes do not fit, or what it takes to calibrate is missing.
          UnsupportedPrimitive: a selected leaf goes through an operation that is not understood.
        """
        del grads
        if calibration is None:
            followed, model = leaves_lib.follow_model(self, params, apply_fn, batches)
        elif self.sequential or weights is not None:
            raise ValueError(
                'a calibration is weighed already, and sequential=True takes statistics as it goes: leave both out, or '
                'the calibration'
            )
        else:
            model: Any = None
            followed = calibration.followed.among(leaves_lib.selected_leaves(self, params))
        plan = leaves_lib.plan_of_matrices(self, params, followed)
        for names in self.blocks or ():
            paths = [leaf.path for leaf in plan]
            tree_lib.check_names(tree_lib.as_names(names), paths, 'blocks')
        planned = {leaf.path: leaf for leaf in plan if leaf.target is not None}
        matrices = [part for path in planned for part in followed.matrices[path]]
        if self.sequential:
            model = model._replace(batches=list(model.batches))
        run = PruningRun(self, params, planned)
        entries: list[CalibratedMatrices] = []
        if calibration is not None:
            entries = [entry for path in planned for entry in calibration[path]]
        elif self.owl or not self.sequential:
            kind = 'second_moment' if self.sequential else self.kind
            entries = take_statistics(model, matrices, kind, weights, progress)
        if self.owl and entries:
            run.sparsities = matrix_sparsities(entries, planned, run.read, self)
        if self.sequential:
            entries.clear()
            run.prune_in_turn(model, matrices, weights, progress)
        run.prune(entries)
        run.warn()
        checks.check_masks(self, params, run.masks)
        return run.params, run.masks

    def plan(
        self,
        params: tree_lib.PyTree,
        *,
        apply_fn: Callable[..., Any] | None = None,
        batches: Iterable[Any] | None = None,
    ) -> PruningPlan:
        """Tells what will happen to each leaf; the model says which leaves are pruned, and along which axes.

        Nothing is computed on a device. Without a model the plan is an upper bound, and its note says so.

        Args:
          params: the parameters, or their shapes.
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
        if apply_fn is not None or batches is not None:
            return leaves_lib.plan_with_model(self, params, apply_fn, batches)
        leaves = self.describe_leaves(*tree_lib.flatten_with_paths(params)[:2])
        types = {leaf.path: leaves_lib.along_any_inputs(leaf.sparsity_type) for leaf in leaves}
        plan = leaves_lib.plan_of_types(self, params, types)
        return dataclasses.replace(plan, note=_NOTE if plan.pruned else '')

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refuses: masks are made once, from batches that an optimizer does not see."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, apply_fn=…, '
            'batches=…), then FixedMask(masks).wrap_optax(tx) to fine-tune'
        )


class PruningRun:
    """The leaves of one model while they are pruned. Those that are given stay as they are.

    Attributes:
      sparsities: those that OWL chose, one for each matrix, by path and reading of the matrices; of all others the
        leaf's plan holds.
    """

    def __init__(self, pruner: Any, params: tree_lib.PyTree, planned: dict[tree_lib.Path, Any]):
        paths, leaves, self._treedef = tree_lib.flatten_with_paths(params)
        self._pruner, self._planned = pruner, planned
        self.sparsities: dict[Any, jax.Array] = {}
        self._leaves: dict[tree_lib.Path, Any] = dict(zip(paths, leaves, strict=True))
        self._masks: dict[tree_lib.Path, jax.Array | None] = dict.fromkeys(paths)
        # Warning -> the leaves that it names.
        self._doubts: dict[str, list[str]] = collections.defaultdict(list)

    @property
    def params(self) -> tree_lib.PyTree:
        """The parameters as they are now."""
        return jax.tree.unflatten(self._treedef, self._leaves.values())

    @property
    def masks(self) -> tree_lib.PyTree:
        """uint8 masks in the parameters' shapes, `None` for leaves of which nothing was pruned."""
        return tree_lib.unflatten(self._treedef, self._masks.values(), self._leaves.values())

    def read(self, matrices: WeightMatrices) -> jax.Array:
        """Reads weight matrices as they are now."""
        leaf = self._leaves[matrices.path]
        return matrices.read(on_explicit_mesh(leaf, leaf))

    def prune(self, entries: list[CalibratedMatrices]) -> None:
        """Prunes matrices, and takes them from the list, so that their statistics are freed."""
        while entries:
            matrices, statistics = entries.pop(0)
            path, where = matrices.path, matrices.where
            planned, given = self._planned[path], self._leaves[path]
            statistics = self._checked(statistics, where)
            sparsity = self.sparsities.get((path, matrices.reading), planned.target)
            sparsity = jnp.asarray(sparsity, jnp.float32)
            if matrices.layer is not None and sparsity.ndim:
                sparsity = sparsity[matrices.layer]
            new, kept = self._pruner.prune_matrices(
                self.read(matrices), statistics, sparsity, planned.sparsity_type, where
            )
            del statistics
            if new is not None and not bool(jnp.isfinite(new).all()):
                raise ValueError(
                    f'{where}: its new weights are not finite; look for NaN or inf in it and in its inputs'
                )
            mask = self._masks[path]
            mask = np.ones(jnp.shape(given), MASK_DTYPE) if mask is None else mask
            changed = on_explicit_mesh((jnp.asarray(given), mask), given)
            changed = CompiledOnce(matrices.replace)(*changed, new, kept)
            if isinstance(given, jax.Array):  # they stay where the leaf is
                changed = jax.device_put(changed, given.sharding)
            self._leaves[path], self._masks[path] = changed

    def prune_in_turn(
        self, model: leaves_lib.Model, matrices: list[WeightMatrices], weights: Any, progress: bool
    ) -> None:
        """Prunes block after block, each by its inputs in the model that the blocks before it have become."""
        kind, blocks = self._pruner.kind, self._pruner.blocks or ()
        sequence = SequentialCalibration(model, matrices, kind, blocks, weights)
        with progress_bar(len(sequence.blocks), progress) as show:
            for number in range(len(sequence.blocks)):
                self.prune(sequence.take(number, self.params))
                show('pruning block by block', number + 1, self.params)

    def warn(self) -> None:
        """Warns once of each kind of doubt about what was pruned."""
        for doubt, names in self._doubts.items():
            more = f' and {len(names) - 5} more' if len(names) > 5 else ''
            caller_warnings.warn(doubt.format(names=', '.join(names[:5]) + more))

    def _checked(self, statistics: InputStatistics, where: str) -> InputStatistics:
        """Refuses statistics that are not finite; lets inputs that never occur be all alike."""
        second_moment = np.asarray(statistics.second_moment)
        if not np.isfinite(second_moment).all():
            raise ValueError(
                f'{where}: its inputs are not finite; look for NaN or inf in the batches and in the model'
            )
        counts, inputs = np.asarray(statistics.count), second_moment.shape[-1]
        samples = float(np.min(counts[counts > 0], initial=np.inf))  # zero has a warning of its own
        if samples < inputs:
            self._doubts[_FEW_SAMPLES].append(f'{where} ({samples:g} samples, {inputs} inputs)')
        is_unseen = (second_moment == 0).all(-1)
        return self._as_if_alike(statistics, is_unseen, where) if is_unseen.any() else statistics

    def _as_if_alike(
        self, statistics: InputStatistics, is_unseen: np.ndarray, where: str
    ) -> InputStatistics:
        for index in np.argwhere(is_unseen).tolist():
            number = f', matrix {", ".join(map(str, index))}' if index else ''
            self._doubts[_UNSEEN].append(where + number)
        count, second_moment, gram = statistics
        if gram is not None:
            gram = jnp.where(is_unseen[..., None, None], jnp.eye(gram.shape[-1]), gram)
        return InputStatistics(count, jnp.where(is_unseen[..., None], 1, second_moment), gram)


_FEW_SAMPLES = (
    'samples are fewer than inputs, so that what they say of these is uncertain: {names}; calibrate with at least as '
    'many samples as inputs'
)
_UNSEEN = (
    'the inputs of these matrices are zero in all batches, so that their weights are ranked as if all inputs were '
    'alike: {names}; give batches that reach them, or leave the leaves dense'
)
