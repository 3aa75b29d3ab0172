"""The base of pruners that look at derivatives of an untrained model: SNIP, GraSP, SynFlow.

In each round derivatives are summed over the batches, weights are scored by them, and the best of the whole model kept.
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, checks
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import global_pruners
from jaxpruner.oneshot.batches import (
    READ_AGAIN,
    as_batches,
    as_inputs,
    check_inputs,
    check_samples,
    first_batch,
)
from jaxpruner.progress import progress_bar
from jaxpruner.trace.compiled_once import CompiledOnce

logger = logging.getLogger(__name__)

LossFn = Callable[..., jax.Array]


def gradients(loss: LossFn, weights: tree_lib.PyTree) -> tree_lib.PyTree:
    """Computes the gradients of the loss of one batch, which most algorithms sum over the batches."""
    return jax.grad(loss)(weights)


def sparsities_of_rounds(sparsity: float, rounds: int) -> list[float]:
    """Computes the sparsity after each round: what is kept shrinks by the same factor in each.

    >>> [round(sparsity, 3) for sparsity in sparsities_of_rounds(0.99, 2)]
    [0.9, 0.99]
    """
    density = 1 - sparsity
    sparsities = []
    for number in range(1, rounds):
        after_round = 1 - density ** (number / rounds)
        sparsities.append(min(after_round, sparsity))
    return [*sparsities, sparsity]


@dataclasses.dataclass
class PruningAtInitialization(global_pruners.GlobalPruningMixin, base_updater.BaseUpdater):
    """Base of the pruners that score weights by derivatives before training; one defines `calculate_scores`.

    All weights of the leaves that the distribution selects are ranked together, in rounds: each prunes some more, and
    takes derivatives anew of the model that the one before has left. What is pruned stays so. Masks are made once: to
    train with them, use `FixedMask`.

    Attributes:
      rounds: how often weights are scored and pruned.
      use_normalization: as for other global pruners; the papers do not.

    Raises:
      TypeError, ValueError: a setting is wrong.

    >>> PruningAtInitialization(rounds=3).rounds
    3
    """

    # What gives the batches a meaning: 'loss_fn', or 'apply_fn'.
    function: ClassVar[str] = 'loss_fn'
    # What is summed over the batches, one pass after another: `(loss, weights, *sums of earlier passes) -> tree`.
    passes: ClassVar[tuple[Callable[..., tree_lib.PyTree], ...]] = (gradients,)

    ranks_named_leaves_alone: ClassVar[bool] = False

    rounds: int = 1
    use_normalization: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.custom_sparsity_map:
            raise ValueError(
                f'{type(self).__name__} ranks all leaves together, those of custom_sparsity_map, too; pass '
                'sparsity_distribution_fn=functools.partial(uniform, sparsity=…, custom_sparsity_map=…), whose targets '
                'count in the total'
            )

    def instant_sparsify(
        self,
        params: tree_lib.PyTree,
        grads: None = None,
        *,
        loss_fn: LossFn | None = None,
        apply_fn: Callable[..., Any] | None = None,
        batches: Iterable[Any] | None = None,
        progress: bool = True,
    ) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
        """Scores the weights and prunes them, round by round.

        Args:
          params: any pytree of arrays. Leaves that hold no floats stay as they are.
          grads: not used.
          loss_fn: `(params, *inputs) -> scalar`; not for `SynFlow`.
          apply_fn: `(params, *inputs) -> results`, the model; for `SynFlow` alone.
          batches: an iterable of batches, a list if they are read more than once: a tuple holds the inputs, anything
            else is the only input. Derivatives are summed over them. Each new shape is compiled anew.
          progress: show a progress bar over the rounds, if stderr is a terminal and rich is installed.

        Returns:
          The pruned parameters, and the (unpacked) masks. Leaves of which nothing is left are warned of.

        Raises:
          ValueError: sparsities do not fit, an argument is missing or one too many, there are no batches or one without
            samples, the loss is no scalar, or scores are not finite.
        """
        del grads
        function = self._given_function(loss_fn, apply_fn, batches)
        sparsities = self.get_target_sparsities(params)
        loss, batches = self.as_loss(function, as_batches(batches))
        first, batches = first_batch(batches, self.rounds * len(self.passes))
        check_inputs(function, first, self.function, params)
        self._check_loss(loss, params, first)
        masks = self.get_initial_masks(params, sparsities)
        if not jax.tree.leaves(masks):
            checks.check_masks(self, params, masks)
            return params, masks
        total = _total(masks, sparsities)
        masks = self._prune_in_rounds(
            loss, params, masks, batches, total_sparsity=total, progress=progress
        )
        if total < 1:
            self._warn_of_collapse(masks)
        checks.check_masks(self, params, masks)
        return self.apply_masks(params, masks), masks

    def as_loss(
        self, function: Callable[..., Any], batches: Iterable[Any]
    ) -> tuple[LossFn, Iterable[Any]]:
        """Returns the loss whose derivatives are taken, and the batches over which they are summed.

        `function` is the loss or the model that was given.
        """
        return function, batches

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Returns targets as the base does; leaves that hold no floats have no derivatives, and stay dense."""

        def of_floats(leaf: Any, target: Any) -> Any:
            return target if tree_lib.holds_weights(leaf) else None

        sparsities = super().get_target_sparsities(params)
        return tree_lib.map_with_missing(of_floats, params, sparsities)

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refuses: masks are made once, before training."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, '
            f'{self.function}=…, batches=…), then FixedMask(masks).wrap_optax(tx) to train'
        )

    def _prune_in_rounds(
        self,
        loss: LossFn,
        params: tree_lib.PyTree,
        masks: tree_lib.PyTree,
        batches: Iterable[Any],
        *,
        total_sparsity: float,
        progress: bool,
    ) -> tree_lib.PyTree:
        """Prunes in rounds; returns the masks after the last."""
        # Compiled once for all rounds, and for all calls with a model of the same program.
        adders = [_compile_adder(loss, derive) for derive in self.passes]
        score = CompiledOnce(self._score, donate_argnums=(0,))
        name = type(self).__name__
        sparsities_to_reach = sparsities_of_rounds(total_sparsity, self.rounds)
        with progress_bar(self.rounds, progress) as show:
            for number, sparsity in enumerate(sparsities_to_reach, 1):
                sums: list[tree_lib.PyTree] = []
                for add in adders:
                    sums.append(_sum_over(batches, add, params, masks, sums))
                scores, are_finite, largest = score(sums.pop(), params, masks)
                self._check_scores(masks, are_finite, largest, number)
                sparsities = jax.tree.map(lambda _, now=sparsity: now, scores)
                masks = self.create_masks(scores, sparsities)
                logger.info(
                    '%s: sparsity %.4f after round %d of %d', name, sparsity, number, self.rounds
                )
                show(name, number, masks)
        return masks

    def _score(
        self, sums: Any, params: Any, masks: Any
    ) -> tuple[tree_lib.PyTree, jax.Array, jax.Array]:
        """Computes the scores, whether those of each leaf are finite, and the largest of all."""
        scores = self.calculate_scores(_selected(params, masks), grads=sums)
        are_finite = []
        largest = []
        for leaf in jax.tree.leaves(scores):
            are_finite.append(jnp.isfinite(leaf).all())
            largest.append(jnp.abs(leaf).max(initial=0))

        def keep_pruned(leaf: jax.Array, mask: jax.Array) -> jax.Array:
            return jnp.where(mask != 0, leaf, -jnp.inf)

        scores = jax.tree.map(keep_pruned, scores, masks)
        return scores, jnp.stack(are_finite), jnp.stack(largest).max()

    def _given_function(
        self, loss_fn: LossFn | None, apply_fn: Callable[..., Any] | None, batches: Any
    ) -> Callable[..., Any]:
        """Returns the loss or the model, whichever the algorithm takes; refuses the other."""
        arguments = {'loss_fn': loss_fn, 'apply_fn': apply_fn, 'batches': batches}
        given = {name: value for name, value in arguments.items() if value is not None}
        if given.keys() != {self.function, 'batches'}:
            other = 'apply_fn' if self.function == 'loss_fn' else 'loss_fn'
            raise ValueError(
                f'{type(self).__name__} takes {self.function}=… and batches=…, and no {other}; got '
                f'{" and ".join(given) or "none of them"}'
            )
        return given[self.function]

    def _check_loss(self, loss: LossFn, params: tree_lib.PyTree, batch: Any) -> None:
        result = jax.eval_shape(loss, params, *as_inputs(batch))
        is_scalar = getattr(result, 'shape', None) == ()
        if not is_scalar or not jnp.issubdtype(result.dtype, jnp.floating):
            raise ValueError(
                f'{type(self).__name__} takes derivatives of one number, and {self.function} leads to {result}; return '
                'a float scalar alone, such as the mean over the batch'
            )

    def _check_scores(
        self, masks: tree_lib.PyTree, are_finite: jax.Array, largest: jax.Array, number: int
    ) -> None:
        paths, _, _ = tree_lib.flatten_with_paths(masks)
        for path, is_finite in zip(paths, are_finite.tolist(), strict=True):
            if not is_finite:
                raise ValueError(
                    f'{tree_lib.path_string(path)}: its scores are not finite in round {number}; look for NaN or inf '
                    'in parameters and batches, and where numbers are merely too large, give the parameters in '
                    "float64, after jax.config.update('jax_enable_x64', True): the masks fit narrower ones, too"
                )
        if number == 1 and not float(largest) > 0:
            raise ValueError(
                f'all scores of {type(self).__name__} are zero: what {self.function} returns does not depend on the '
                'leaves that are to be pruned, or its derivatives are too small for their dtype'
            )

    def _warn_of_collapse(self, masks: tree_lib.PyTree) -> None:
        """Warns of leaves without weights: one of these mostly cuts the model in two."""
        paths, leaves, _ = tree_lib.flatten_with_paths(masks)
        empty = []
        for path, mask in zip(paths, leaves, strict=True):
            if mask.size and not checks.keeps_any(mask):
                empty.append(tree_lib.path_string(path))
        if empty:
            warnings.warn(
                f'{", ".join(empty)}: {type(self).__name__} left no weight there, so that '
                'what comes before may have no effect; take more rounds=…, a lower sparsity, or synflow',
                UserWarning,
                stacklevel=3,
            )


def _sum_over(
    batches: Iterable[Any], add: Callable[..., Any], params: Any, masks: Any, sums: Any
) -> tree_lib.PyTree:
    """Passes over the batches once; sums are float32 or wider, and lie on the devices of the parameters."""
    total = None
    for number, batch in enumerate(batches):
        check_samples(batch, number)
        if total is None:
            total = jax.tree.map(_wide_zeros, _selected(params, masks))
        total = add(total, sums, params, masks, *as_inputs(batch))
    if total is None:
        raise ValueError(f'batches were empty when they were read again; {READ_AGAIN}')
    return total


def _compile_adder(loss_fn: LossFn, derive: Callable[..., Any]) -> CompiledOnce:
    """Compiles a function that adds what a pass derives from a batch, for the model without its pruned weights."""

    def put_back(leaf: Any, weight: jax.Array | None, mask: Any) -> Any:
        return leaf if weight is None else jnp.where(mask != 0, weight, 0)

    def add_term(total: jax.Array, term: jax.Array) -> jax.Array:
        return total + term.astype(total.dtype)

    def add(total: Any, sums: Any, params: Any, masks: Any, *inputs: Any) -> Any:
        def loss(weights: tree_lib.PyTree) -> jax.Array:
            pruned = tree_lib.map_with_missing(put_back, params, weights, masks)
            return loss_fn(pruned, *inputs)

        terms = derive(loss, _selected(params, masks), *sums)
        return jax.tree.map(add_term, total, terms)

    return CompiledOnce(add, donate_argnums=(0,))


def _wide_zeros(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)  # NumPy's float64 is only that where 64 bits are enabled
    dtype = tree_lib.at_least_float32(leaf.dtype)
    return jnp.zeros_like(leaf, dtype=dtype)


def _selected(params: tree_lib.PyTree, masks: tree_lib.PyTree) -> tree_lib.PyTree:
    """Keeps the leaves that have a mask, `None` for the others."""

    def select(leaf: Any, mask: Any) -> Any:
        return None if mask is None else leaf

    return tree_lib.map_with_missing(select, params, masks)


def _total(masks: tree_lib.PyTree, sparsities: tree_lib.PyTree) -> float:
    """Computes the sparsity of all weights that are ranked."""
    sizes = [mask.size for mask in jax.tree.leaves(masks)]
    of_leaves = jax.tree.leaves(sparsities)
    return float(global_pruners.total_sparsity(of_leaves, sizes))
