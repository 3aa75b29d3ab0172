"""Training that is sparse from the first step: static masks, SET, RigL."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, groups, optimizer_state, scoring, selection, sparsity_types, targets, utils
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners

# A leaf of fewer weights has its scores written down: programs that only read them compile faster, which counts where
# leaves are many, and memory counts where they are large.
_WORTH_SPARING = 2**19


@dataclasses.dataclass
class StaticRandomSparse(base_updater.BaseUpdater):
    """Random masks at initialisation, kept to the end.

    Call `post_gradient_update` once after `init`, so that the first forward pass is sparse.

    >>> updater = StaticRandomSparse(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> int(updater.init_state({'w': jnp.ones(8)}).masks['w'].sum())
    4
    """

    approaches_target: ClassVar[bool] = False

    is_sparse_gradients: bool = True

    def get_initial_masks(self, params, target_sparsities):
        """Random masks at the target sparsities."""
        return self.create_masks(pruners.generate_random_scores(params, self.rng_seed), target_sparsities)

    def update_state(self, sparse_state, params, grads):
        """The state as it is."""
        del params, grads
        return sparse_state

    def instant_sparsify(self, params, grads=None):
        """Refused: there is nothing to train sparse.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError(
            f'{type(self).__name__} trains sparse from the start: instant_sparsify is not supported in sparse training '
            'methods; use wrap_optax, or RandomPruning for one-shot pruning at random'
        )


@dataclasses.dataclass
class SET(StaticRandomSparse):
    """Sparse evolutionary training: drops the smallest kept weights, regrows as many at random. Mocanu et al., 2018.

    On update steps the optimizer is skipped. A weight that comes back starts at zero with zeroed moments; one that is
    dropped and regrown in the same update keeps both. Call `post_gradient_update` once after `init`.

    Attributes:
      drop_fraction_fn: step -> share of the kept weights (or blocks, channels) to replace, in [0, 1].

    Raises:
      ValueError: N:M, in whose groups a weight cannot be replaced freely; or a drop fraction outside [0, 1].

    >>> SET(drop_fraction_fn=lambda step: 0.3).skip_gradients
    True
    """

    regrows_from_zero: ClassVar[bool] = True

    skip_gradients: bool = True
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.1)

    def __post_init__(self):
        super().__post_init__()
        if self.topk_fn is not None:
            raise ValueError(
                f'{type(self).__name__} drops and regrows by its own ranking: topk_fn has no meaning for it'
            )
        if not callable(self.drop_fraction_fn):
            raise TypeError(
                f'drop_fraction_fn must be a function of the step, got {self.drop_fraction_fn!r}; '
                'for a constant pass optax.constant_schedule(…)'
            )
        # Schedules decay from their first value; a function of the step that needs more fails here, before training.
        check_drop_fraction(self.drop_fraction_fn(0), 'drop_fraction_fn(0)')

    def check_type(self, sparsity_type, where=''):
        """Refuses N:M."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            raise ValueError(
                f'{where}{type(self).__name__} replaces weights anywhere in a leaf, which N:M groups do not allow, got '
                f'{sparsity_type}; use unstructured, block or channel sparsity, or StaticRandomSparse for N:M'
            )

    def check_optimizer(self, inner, params):
        """Refuses optimizers whose moments cannot be zeroed."""
        optimizer_state.check_resettable(inner, params)

    @scoring.of_each_weight(jnp.abs)
    def get_drop_scores(self, sparse_state, params, grads):
        """Scores of the weights: the smallest kept ones are dropped."""
        del sparse_state, grads
        return pruners.magnitudes(params)

    def get_grow_scores(self, sparse_state, params, grads):
        """Scores of the weights: the largest that are not kept come back. Here chance, from the seed and the step."""
        del grads
        return pruners.generate_random_scores(params, utils.prng_key(self.rng_seed, sparse_state.count))

    def update_state(self, sparse_state, params, grads):
        """Drops and regrows; the number of kept weights stays."""
        fraction = self.drop_fraction_fn(sparse_state.count)
        drop_scores, grow_scores = (
            _scores_of(method, sparse_state, params, grads) for method in (self.get_drop_scores, self.get_grow_scores)
        )
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        types, stacked = self._leaf_types(paths, leaves), targets.are_stacked(self.stacked, paths)
        old, drop, grow = (tree_lib.leaves_like(treedef, t) for t in (sparse_state.masks, drop_scores, grow_scores))
        masked = [i for i, mask in enumerate(old) if mask is not None]
        replaced = drop_and_grow(
            [old[i] for i in masked],
            [drop[i] for i in masked],
            [grow[i] for i in masked],
            [types[i] for i in masked],
            [stacked[i] for i in masked],
            fraction=fraction,
        )
        masks = dict(zip(masked, replaced, strict=True))
        return sparse_state._replace(masks=jax.tree.unflatten(treedef, [masks.get(i) for i in range(len(leaves))]))

    def moments_to_reset(self, old_state, new_state):
        """The weights that were pruned before and are kept now."""
        leaves, treedef = jax.tree.flatten(new_state.masks)
        old = tree_lib.leaves_like(treedef, old_state.masks)
        return jax.tree.unflatten(treedef, [(new != 0) & (was == 0) for new, was in zip(leaves, old, strict=True)])


@dataclasses.dataclass
class RigL(SET):
    """Rigging the lottery: as SET, but regrows where the gradient is largest. Evci et al., 2020.

    >>> RigL(drop_fraction_fn=lambda step: 0.3).is_sparse_gradients
    True
    """

    @scoring.of_each_gradient(jnp.abs)
    def get_grow_scores(self, sparse_state, params, grads):
        """The gradients' magnitudes."""
        del sparse_state, params
        return pruners.magnitudes(grads)


def check_drop_fraction(fraction: Any, name: str) -> None:
    """Refuses a drop fraction outside [0, 1]; traced values pass.

    Args:
      fraction: a number or scalar array.
      name: what it is called, for the message.

    Raises:
      ValueError: it lies outside.
      TypeError: it is no number.

    >>> check_drop_fraction(0.3, 'drop_fraction')
    """
    if tree_lib.is_traced(fraction):
        return
    if isinstance(fraction, str) or not hasattr(fraction, '__float__'):
        raise TypeError(f'{name} must be a number between 0 and 1, got {fraction!r}')
    if not 0 <= float(fraction) <= 1:
        raise ValueError(f'{name} must lie in [0, 1] (the share of kept weights that is replaced), got {fraction}')


def drop_and_grow(
    masks: Sequence[jax.Array],
    drop_scores: Sequence[jax.Array | selection.Scores],
    grow_scores: Sequence[jax.Array | selection.Scores],
    types: Sequence[sparsity_types.GroupedType],
    stacked: Sequence[bool] | None = None,
    *,
    fraction: jax.Array | float,
) -> list[jax.Array]:
    """Replaces a share of the kept weights (or blocks, channels) of each leaf, whose number stays.

    Args:
      masks: uint8 masks.
      drop_scores: of their shapes, or `Scores`; of the kept ones those with the smallest scores are dropped,
        `round(kept * fraction)` of them.
      grow_scores: of their shapes, or `Scores`; of all that are not kept then, those with the largest scores come back.
      types: unstructured, block or channel.
      stacked: whether the first axis of a leaf counts layers, in each of which weights are replaced.
      fraction: scalar in [0, 1].

    Returns:
      The new masks.

    Raises:
      ValueError: scores have another shape than their mask.

    >>> mask, scores = jnp.array([1, 1, 0, 0], jnp.uint8), jnp.array([3.0, 1.0, 0.0, 0.0])
    >>> types = [sparsity_types.Unstructured()]
    >>> drop_and_grow([mask], [scores], [jnp.array([0.0, 0.0, 1.0, 2.0])], types, fraction=0.5)
    [Array([1, 0, 0, 1], dtype=uint8)]
    """
    stacked = list(stacked or [False] * len(masks))
    leaves = list(zip(masks, drop_scores, grow_scores, types, stacked, strict=True))
    pooled = [_pooled(*leaf) for leaf in leaves]
    apart = [_is_of_weights(kind) for kind in types]
    alive_numbers = [_number(alive, in_layers) for (alive, _, _), in_layers in zip(pooled, stacked, strict=True)]
    kept = selection.keep_largest_each(
        [_masked_scores(alive, drop, _OfKept) for alive, drop, _ in pooled],
        [
            number - selection.share_of(number, fraction, most=alive.size)
            for number, (alive, _, _) in zip(alive_numbers, pooled, strict=True)
        ],
        in_rows=stacked,
        apart=apart,
    )
    kept = [(chosen.mask != 0) & alive for chosen, (alive, _, _) in zip(kept, pooled, strict=True)]
    missing = [
        alive - _number(left, in_layers) for alive, left, in_layers in zip(alive_numbers, kept, stacked, strict=True)
    ]
    grown = selection.keep_largest_each(
        [_masked_scores(left, grow, _OfMissing) for left, (_, _, grow) in zip(kept, pooled, strict=True)],
        missing,
        in_rows=stacked,
        apart=apart,
    )
    new = [left.astype(jnp.uint8) | chosen.mask for left, chosen in zip(kept, grown, strict=True)]
    return [
        groups.spread(kind, verdicts, mask.shape, in_layers)
        for verdicts, (mask, _, _, kind, in_layers) in zip(new, leaves, strict=True)
    ]


def _scores_of(method: Callable[..., Any], sparse_state: Any, params: Any, grads: Any) -> Any:
    """What a method returns, not written down where that can be."""
    scores = scoring.said_of(method, params, grads)
    return method(sparse_state, params, grads) if scores is None else scores


def _is_of_weights(kind: sparsity_types.GroupedType) -> bool:
    """Whether single weights are ranked, as they lie; a subclass may pool them in another way."""
    return type(kind) is sparsity_types.Unstructured


def _pooled(mask, drop, grow, kind, in_layers) -> tuple[jax.Array, Any, Any]:
    """Whether groups are alive, and their scores."""
    if _is_of_weights(kind) and mask.size:
        return mask != 0, drop, grow
    pool = functools.partial(groups.pool, kind, in_layers=in_layers)
    return pool(mask.astype(jnp.float32)) > 0, pool(selection.read(drop)), pool(selection.read(grow))


def _masked_scores(kept: jax.Array, scores: jax.Array | selection.Scores, form: type) -> jax.Array | selection.Scores:
    """Scores of weights (or groups) that depend on which of them are kept; many are not written down."""
    if scores.shape != kept.shape:
        raise ValueError(
            f'scores of shape {scores.shape} do not fit a mask of shape {kept.shape}; give one score for each weight'
        )
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        scores = selection.read(scores).astype(jnp.float32)
    if not isinstance(scores, selection.Scores):
        scores = selection.Scores(scores, jnp.positive)
    masked = selection.Scores((scores.weights, kept), form(scores.of))
    return masked if masked.size >= _WORTH_SPARING else selection.read(masked)


@dataclasses.dataclass(frozen=True)
class _OfKept:
    """Scores of what is kept; the rest comes last."""

    of: Callable[[jax.Array], jax.Array]

    def __call__(self, weights_and_kept: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights, kept = weights_and_kept
        return jnp.where(kept, self.of(weights), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _OfMissing:
    """Scores of what is not kept; the rest comes last."""

    of: Callable[[jax.Array], jax.Array]

    def __call__(self, weights_and_kept: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights, kept = weights_and_kept
        scores = self.of(weights)
        # NaN and -inf would not rank above what is kept: after an overflow weights must come back somewhere.
        lowest = jnp.finfo(scores.dtype).min
        scores = jnp.where(scores >= lowest, scores, lowest)
        return jnp.where(kept, -jnp.inf, scores)


def _number(flags: jax.Array, in_layers: bool) -> jax.Array:
    return selection.count_true(flags, tuple(range(int(in_layers), flags.ndim)), selection.counter_for(flags.size))
