"""SNIP, GraSP and SynFlow: weights of an untrained model are scored by derivatives of a loss.

In each round derivatives are summed over the batches, weights are scored by them, and the best of the whole model kept.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, caller_warnings, checks
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import global_pruners, pruners
from jaxpruner.oneshot.leaves import as_inputs, check_inputs, first_batch
from jaxpruner.progress import progress_bar

LossFn = Callable[..., jax.Array]


def gradients(loss: LossFn, weights: tree_lib.PyTree) -> tree_lib.PyTree:
    """Computes the gradients of the loss of one batch, which most algorithms sum over the batches."""
    return jax.grad(loss)(weights)


def hessian_product(loss: LossFn, weights: Any, direction: Any) -> Any:
    """Multiplies the Hessian of a loss by a vector, which is a tree like the weights, as the result is.

    >>> float(hessian_product(lambda weight: weight**3, jnp.float32(2), jnp.float32(10)))  # the second derivative is 12
    120.0
    """
    # JAX's gradient of a complex weight is the conjugate of the direction of steepest ascent.
    cast = lambda vector, weight: jnp.conj(vector).astype(weight.dtype)  # noqa: E731
    tangents = jax.tree.map(cast, direction, weights)
    return jax.jvp(jax.grad(loss), (weights,), (tangents,))[1]


@dataclasses.dataclass
class PruningAtInitialization(global_pruners.GlobalPruningMixin, base_updater.BaseUpdater):
    """Base of the pruners that score weights by derivatives before training, as `calculate_scores` says.

    All weights of the leaves that the distribution selects are ranked together, in rounds: each prunes some more, and
    takes derivatives anew of the model that the one before has left. What is pruned stays so. Masks are made once: to
    train with them, use `FixedMask`.

    What was summed over the batches comes to `calculate_scores` as `grads`. A subclass may also override `passes`,
    `function`, `as_loss` and the default of `rounds`.

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
    needs_gradients: ClassVar[bool] = True

    rounds: int = 1
    use_normalization: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.custom_sparsity_map:
            raise ValueError(
                f'{type(self).__name__} ranks all leaves together: give custom_sparsity_map to uniform, as '
                'sparsity_distribution_fn=functools.partial(uniform, …), whose targets count in the total'
            )

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores weights by the magnitudes of weight times derivative."""
        del sparse_state
        return pruners.saliencies(params, grads)

    def as_loss(self, function: Callable[..., Any], batches: Iterable[Any]) -> tuple[Any, Any]:
        """Returns the loss whose derivatives are taken, and the batches over which they are summed.

        `function` is the loss or the model that was given.
        """
        return function, batches

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
          ValueError: sparsities do not fit, an argument is missing or one too many, there are no batches, or scores are
            not finite.
        """
        del grads
        name = type(self).__name__
        given = {'loss_fn': loss_fn, 'apply_fn': apply_fn, 'batches': batches}
        given = {key: value for key, value in given.items() if value is not None}
        if given.keys() != {self.function, 'batches'}:
            raise ValueError(
                f'{name} takes {self.function}=… and batches=… alone; got '
                f'{" and ".join(given) or "none of them"}'
            )
        targets = self.get_target_sparsities(params)
        loss, batches = self.as_loss(given[self.function], given['batches'])
        times = self.rounds * len(self.passes)
        if times > 1 and isinstance(batches, Iterator):
            raise ValueError(
                f'batches are read {times} times, and an iterator can be read once; give a list, or another iterable '
                'that begins anew each time'
            )
        first, once = first_batch(batches)
        batches = batches if times > 1 else once
        check_inputs(given[self.function], first, self.function)
        masks = self.get_initial_masks(params, targets)
        total, rounds = 0.0, 0
        if sizes := [mask.size for mask in jax.tree.leaves(masks)]:
            rounds = self.rounds
            total = float(global_pruners.total_sparsity(jax.tree.leaves(targets), sizes))
        passes = [_sum_over_batches(loss, derive) for derive in self.passes]
        score = jax.jit(lambda weights, sums: self.calculate_scores(weights, grads=sums))
        with progress_bar(rounds, progress) as show:
            for number in range(1, rounds + 1):
                sums: list[tree_lib.PyTree] = []
                for sum_over in passes:
                    sums.append(sum_over(batches, params, masks, sums))
                scores = score(_selected(params, masks), sums[-1])
                self._check_scores(scores, number)
                lowest = lambda leaf, mask: jnp.where(mask != 0, leaf, -jnp.inf)  # noqa: E731
                scores = jax.tree.map(lowest, scores, masks)
                # What is kept shrinks by the same factor in each round.
                now = total
                if number < rounds:
                    now = min(1 - (1 - total) ** (number / rounds), total)
                masks = self.create_masks(scores, jax.tree.map(lambda _, now=now: now, scores))
                show(name, number, masks)
        empty = []
        for path, mask in tree_lib.zip_with_paths(masks):
            if mask.size and not mask.any():
                empty.append(tree_lib.path_string(path))
        if empty and total < 1:
            caller_warnings.warn(
                f'{", ".join(empty)}: {name} left no weight there, so that what comes before may have no effect; take '
                'more rounds=…, a lower sparsity, or synflow'
            )
        checks.check_masks(self, params, masks)
        return self.apply_masks(params, masks), masks

    def _check_scores(self, scores: tree_lib.PyTree, number: int) -> None:
        """Refuses scores of a round that rank nothing."""
        for path, leaf in tree_lib.zip_with_paths(scores):
            if not jnp.isfinite(leaf).all():
                raise ValueError(
                    f'{tree_lib.path_string(path)}: its scores are not finite in round {number}; look for NaN or inf '
                    'in parameters and batches, and where numbers are merely too large, give the parameters in '
                    "float64, after jax.config.update('jax_enable_x64', True): the masks fit narrower ones, too"
                )
        if number == 1 and not any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(scores)):
            raise ValueError(
                f'all scores of {type(self).__name__} are zero: what {self.function} returns does not depend on the '
                'leaves that are to be pruned, or its derivatives are too small for their dtype'
            )

    def wrap_optax(self, inner: optax.GradientTransformation) -> NoReturn:
        """Refuses: masks are made once, before training."""
        raise TypeError(
            f'{type(self).__name__} prunes once and wraps no optimizer; call instant_sparsify(params, '
            f'{self.function}=…, batches=…), then FixedMask(masks).wrap_optax(tx) to train'
        )


def _sum_over_batches(loss_fn: LossFn, derive: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the function that sums what a pass derives from each batch, for the model without its pruned weights."""

    def put_back(leaf: Any, weight: jax.Array | None, mask: Any) -> Any:
        return leaf if weight is None else jnp.where(mask != 0, weight, 0)

    @jax.jit
    def terms_of(params: Any, masks: Any, sums: Any, *inputs: Any) -> Any:
        def loss(weights: tree_lib.PyTree) -> jax.Array:
            return loss_fn(tree_lib.map_with_missing(put_back, params, weights, masks), *inputs)

        terms = derive(loss, _selected(params, masks), *sums)
        return jax.tree.map(lambda term: term.astype(tree_lib.at_least_float32(term.dtype)), terms)

    def sum_over(batches: Any, params: Any, masks: Any, sums: Any) -> tree_lib.PyTree:
        total = None
        for batch in batches:
            terms = terms_of(params, masks, sums, *as_inputs(batch))
            total = terms if total is None else jax.tree.map(jnp.add, total, terms)
        if total is None:
            raise ValueError('batches were empty when they were read again; give a list')
        return total

    return sum_over


def _selected(params: tree_lib.PyTree, masks: tree_lib.PyTree) -> tree_lib.PyTree:
    """Keeps the leaves that have a mask, `None` for the others."""
    return tree_lib.map_with_missing(
        lambda leaf, mask: None if mask is None else leaf, params, masks
    )


@dataclasses.dataclass
class SNIP(PruningAtInitialization):
    r"""Keeps the weights with the largest $|w \cdot \partial L / \partial w|$ in the model, $L$ summed over batches.

    From Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", 2019. With more than one of
    `rounds` it is Iter SNIP, from de Jorge et al., "Progressive Skeletonization: Trimming more fat from a network at
    initialization", 2021.

    >>> params = {'w': jnp.array([[3.0, 1.0]])}
    >>> pruner = SNIP(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> loss_fn = lambda params, x: jnp.sum(x * params['w'])
    >>> pruner.instant_sparsify(params, loss_fn=loss_fn, batches=[jnp.array([1.0, 9.0])])[1]['w'].tolist()
    [[0, 1]]
    """


@dataclasses.dataclass
class GraSP(PruningAtInitialization):
    r"""Keeps the gradient flow: weights with the largest $w \cdot H g$ stay.

    Without weight $w_i$ the gradient's squared norm changes by $-2 w_i (H g)_i$ to first order: those whose removal
    makes it grow most go first. $g$ and $H$ are derivatives with respect to the leaves that are pruned, each summed
    over the batches, which are read twice in a round. From Wang et al., "Picking Winning Tickets Before Training by
    Preserving Gradient Flow", 2020, whose code divides logits by a temperature of 200: that belongs into the loss.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.array([[1.0, 1.0, 1.0]])}
    >>> pruner = GraSP(sparsity_distribution_fn=lambda params: {'w': 2 / 3})
    >>> loss_fn = lambda params, x: jnp.sum((params['w'] - x) ** 2)  # gradients are -2, 1 and -4: the second shrinks
    >>> pruner.instant_sparsify(params, loss_fn=loss_fn, batches=[jnp.array([2.0, 0.5, 3.0])])[1]['w'].tolist()
    [[0, 1, 0]]
    """

    passes: ClassVar = (gradients, hessian_product)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Multiplies weights by the Hessian's product with the gradient, which comes as `grads`."""
        del sparse_state
        score = lambda weight, product: jnp.real(weight.astype(product.dtype) * product)  # noqa: E731
        return jax.tree.map(score, params, grads)


@dataclasses.dataclass
class SynFlow(PruningAtInitialization):
    r"""Keeps the weights with the largest $|w \cdot \partial R / \partial w|$, and needs no data.

    $R$ is the sum of the outputs when all parameters are replaced by their magnitudes, and all inputs by ones: of the
    batches only the first one's shapes and dtypes are used, which `jax.ShapeDtypeStruct` can give. Whole numbers are
    ones, too. Apply the model as in evaluation: without dropout, and with constant statistics in batch norm. Where $R$
    exceeds float32, as in deep models, an error says so. From Tanaka et al., "Pruning neural networks without any data
    by iteratively conserving synaptic flow", 2020.

    >>> params = {'in': jnp.array([[3.0, -2.0]]), 'out': jnp.array([[-1.0], [4.0]])}  # 3 x 1 here, 2 x 4 there
    >>> pruner = SynFlow(sparsity_distribution_fn=lambda params: {'in': 0.5, 'out': 0.5})
    >>> apply_fn = lambda params, x: x @ params['in'] @ params['out']
    >>> _, masks = pruner.instant_sparsify(params, apply_fn=apply_fn, batches=[jnp.zeros((1, 1))])
    >>> masks['in'].tolist(), masks['out'].tolist()
    ([[0, 1]], [[0], [1]])
    """

    function: ClassVar[str] = 'apply_fn'

    rounds: int = 100

    def as_loss(self, function: Callable[..., Any], batches: Iterable[Any]) -> tuple[Any, Any]:
        """Returns the flow, and one batch of ones."""

        def flow(params: Any, *inputs: Any) -> Any:
            size = lambda leaf: jnp.abs(leaf) if tree_lib.holds_weights(leaf) else leaf  # noqa: E731
            results = map(
                jnp.asarray, jax.tree.leaves(function(jax.tree.map(size, params), *inputs))
            )
            total: Any = 0
            for result in filter(tree_lib.holds_weights, results):
                total += jnp.sum(result, dtype=tree_lib.at_least_float32(result.dtype))
            return total

        def ones_like(leaf: Any) -> jax.Array:
            if not hasattr(leaf, 'shape'):
                raise ValueError(
                    'batches tell SynFlow the shapes of the inputs, by arrays or jax.ShapeDtypeStruct(shape, dtype); '
                    f'got {leaf!r}'
                )
            return jnp.ones(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

        first, _ = first_batch(batches)
        return flow, [jax.tree.map(ones_like, as_inputs(first))]
