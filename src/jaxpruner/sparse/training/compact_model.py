"""A model of which some leaves are stored compactly: weights that an optimizer trains, and where they stand."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import tree_utils

from jaxpruner import checks, control, seeds, sparsity_schedules
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training.elementwise_optimizers import check_elementwise
from jaxpruner.sparse.training.layouts import Layout, moved
from jaxpruner.sparse.training.plans import BlockPlan

Topology = Mapping[
    str, Mapping[str, Any]
]  # by name of the leaf: whole numbers that say where its weights are
Gradients = Mapping[str, jax.Array]  # by name of the leaf

_CHECKED_STEPS = 4  # first and last update steps whose drop fraction is checked beforehand


def _random_scores(model: 'CompactModel', step: Any, gradients: Any) -> dict[str, jax.Array]:
    """SET grows at random: the scores are drawn anew at each step."""
    del gradients
    keys = seeds.split_key(seeds.prng_key(model.rng_seed, step), len(model.layouts))
    scores = {}
    for (name, layout), key in zip(model.layouts.items(), keys, strict=True):
        draw = functools.partial(jax.random.uniform, shape=(*layout.rows, layout.candidates))
        scores[name] = control.draw_in_loop(draw, key)
    return scores


def _gradient_magnitudes(model: 'CompactModel', step: Any, gradients: Any) -> dict[str, jax.Array]:
    """RigL grows where gradients are largest."""
    del step
    if gradients is None:
        raise ValueError(
            'update: rigl grows by probe_grads, the gradient of the loss with respect to model.probe(); pass it, or a '
            'function that computes it, or use set'
        )
    return {name: jnp.abs(gradients[name]) for name in model.layouts}


# The algorithms by their names in configurations, each with the scores by which it grows. All drop the blocks or
# weights of the smallest magnitudes.
STATIC = 'static_sparse'  # drops and grows nothing
GROW_SCORES: Mapping[str, Callable[..., Gradients]] = {
    'set': _random_scores,
    'rigl': _gradient_magnitudes,
}
ALGORITHMS = (STATIC, *GROW_SCORES)


@dataclasses.dataclass(frozen=True)
class CompactModel:
    """A model in blocks or in CSR, as `block_sparse` and `unstructured_sparse` make it.

    It holds no arrays; weights and topology go through it. Weights are the tree of the parameters. In the place of a
    leaf that is stored compactly stands a dictionary:

    - blocks: `'values'`, `[*layers, groups, blocks, in, out]`, and with a term of low rank `'down'`,
      `[*layers, inputs, rank]`, and `'up'`, `[*layers, rank, outputs]`;
    - single weights: `'compressed'`, `[*layers, kept]`, in the order of the matrix transposed.

    The topology has int32 arrays for each of these leaves, by name. `'positions'` says which blocks each group of
    outputs stores, `[*layers, groups, blocks]`, or where single weights stand in the flattened `[outputs, inputs]`.
    Single weights also have what the kernel reads: 8 bytes a kept weight.

    Attributes:
      products: the matrices of the model.
      plan: what becomes of each leaf; it prints as a table.
      layouts: how each leaf is stored that is stored compactly, by name.
      algorithm: `'static_sparse'`, `'set'` or `'rigl'`.
      scheduler: in which steps something is dropped and grown.
      drop_fraction_fn: step -> the share of the stored blocks or weights of each matrix that is dropped.
      rng_seed: of positions drawn at random.

    >>> import jaxpruner
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> model = jaxpruner.sparse.block_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.75, block=(4, 8))
    >>> weights, topology = model.pack(params)
    >>> jax.tree.map(jnp.shape, (weights, topology))
    ({'bias': (32,), 'kernel': {'values': (4, 1, 4, 8)}}, {'kernel': {'positions': (4, 1)}})
    """

    products: Products
    plan: BlockPlan
    layouts: Mapping[str, Layout]
    algorithm: str
    scheduler: sparsity_schedules.BaseSchedule
    drop_fraction_fn: Callable[[Any], Any]
    rng_seed: Any

    @property
    def ever_moves(self) -> bool:
        """Whether anything is ever dropped."""
        never = isinstance(self.scheduler, sparsity_schedules.NoUpdateSchedule)
        return self.algorithm != STATIC and not never

    def pack(
        self,
        params: Any,
        topology: Topology | None = None,
        *,
        select: Literal['random', 'magnitude'] = 'random',
    ) -> tuple[Any, Topology]:
        """Takes what is stored out of parameters.

        Args:
          params: the dense parameters.
          topology: where blocks or weights are, as from an earlier call.
          select: what is stored if there is no topology: `'random'` blocks or weights, or for a trained model the
            largest (`'magnitude'`). Random blocks are drawn such that all inputs lead to about the same number of
            groups.

        Returns:
          Weights and topology. A term of low rank starts at zero: `'down'` is random, and `'up'` zero.

        Raises:
          ValueError: a leaf has another shape than in the model, or an unknown way to select.
        """
        ways = 'random', 'magnitude'
        if select not in ways:
            near = tree_lib.nearest(str(select), ways)
            raise ValueError(f'select={select!r} is unknown; {near}')
        positions: Mapping[str, Any] = {}
        if topology is not None:
            positions = {name: topology[name]['positions'] for name in self.layouts}
        elif select == 'random':
            positions = drawn_positions(self.layouts, self.rng_seed)

        def pack(params: Any, positions: Mapping[str, Any]) -> tuple[Any, Topology]:
            stored, packed = {}, {}
            keys = seeds.split_key(seeds.prng_key(self.rng_seed), len(self.layouts))
            leaves = self.products.leaves(params)
            for (name, layout), key in zip(self.layouts.items(), keys, strict=True):
                matrices = self.products.by_leaf[name].to_matrix(leaves[name])
                at = positions[name] if positions else layout.largest(matrices)
                packed[name] = layout.topology(at)
                stored[name] = layout.store(matrices, packed[name]['positions'], key)
            return self.products.put(params, stored), packed

        if tree_lib.has_traced((params, positions)):
            return pack(params, positions)
        return jax.jit(pack)(params, positions)

    def apply(
        self, weights: Any, topology: Topology, *inputs: Any, probe: Gradients | None = None
    ) -> Any:
        """Runs the model.

        Args:
          weights: as `pack` returns them.
          topology: where they are kept.
          *inputs: of the model; other shapes than those of the sample are traced anew.
          probe: `model.probe()`, to get RigL's scores; `probe` says what the backward pass returns for it.

        Returns:
          What the model returns for `unpack(weights, topology)`.
        """
        operators = {}
        for name, stored in self._stored(weights).items():
            probe_of_leaf = None if probe is None else probe[name]
            operators[name] = self.layouts[name].operator(stored, topology[name], probe_of_leaf)
        with_operators = self.products.put(weights, operators)
        return self.products.apply(with_operators, *inputs)

    def probe(self) -> dict[str, jax.Array]:
        """Zeros, float32 by name of the leaf, for all blocks or weights that could be kept: RigL grows by them.

        The probe changes no result, so its derivative is zero. The backward pass returns something else in place of
        that:

        - for single weights, `[*layers, outputs * inputs]`, the gradient with respect to the dense matrix transposed;
        - for blocks, `[*layers, groups, blocks of inputs]`, the norm of each block of that gradient. If a leaf is
          multiplied at several places, in several trips of a loop, or under a `jax.vmap` around `apply`, these norms
          are added. Their sum is at least the norm of the gradient, and larger where gradients cancel.

        >>> # gradients = jax.grad(loss, argnums=2)(weights, topology, model.probe(), batch)
        """
        probe = {}
        for name, layout in self.layouts.items():
            probe[name] = jnp.zeros((*layout.rows, layout.candidates))
        return probe

    def unpack(self, weights: Any, topology: Topology) -> Any:
        """The dense parameters, in the tree and dtypes that `pack` was given; zeros where nothing is kept.

        With a term of low rank the product of its two matrices is added, so no weight stays zero; `masks` says where
        the blocks are.
        """
        leaves = {}
        for name, stored in self._stored(weights).items():
            matrices = self.layouts[name].restore(stored, topology[name]['positions'])
            leaves[name] = self.products.by_leaf[name].from_matrix(matrices)
        return self.products.put(weights, leaves)

    def masks(self, topology: Topology) -> Any:
        """The masks: a tree like the parameters, uint8, with `None` for leaves that stay dense."""
        masks: dict[str, Any] = dict.fromkeys(self.plan.leaves)
        for name, layout in self.layouts.items():
            matrices = layout.mask(topology[name]['positions'])
            masks[name] = self.products.by_leaf[name].from_matrix(matrices)
        return self.products.unflatten(masks)

    def wrap_optax(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer, which checks at `init` that it takes the step of the masked dense model.

        Raises:
          ValueError: at `init`, for optimizers that depend on shapes, such as muon and adafactor; also for those whose
            moments cannot follow when weights are replaced.
        """
        optimizer = optax.with_extra_args_support(tx)

        def init(params: Any) -> Any:
            # optax finds moments by an init with a placeholder, which has no leaves.
            if jax.tree.leaves(params):
                self._check_optimizer(optimizer, params)
            return optimizer.init(params)

        return optax.GradientTransformationExtraArgs(init, optimizer.update)

    def update(
        self,
        weights: Any,
        topology: Topology,
        opt_state: Any,
        *,
        tx: optax.GradientTransformation,
        step: Any,
        probe_grads: Gradients | Callable[[Any, Topology], Gradients] | None = None,
        due: Any = None,
    ) -> tuple[Any, Topology, Any]:
        """Drops the smallest blocks or weights and grows as many others, if the schedule says so.

        Of each matrix, `round(fraction * stored)` blocks or weights are dropped. Blocks are ranked by their mean
        square; each group grows as many as it dropped, and keeps its largest block, unless the fraction is 1. What is
        grown starts at zero, with moments of zero. This may be called in every step, inside `jax.jit`.

        Args:
          weights: as they are after the optimizer's step.
          topology: where they are kept.
          opt_state: of `tx`.
          tx: the optimizer.
          step: its number, an int32 scalar or a Python int.
          probe_grads: for RigL, what the backward pass returns for `probe()`, by name. Or a function of weights and
            topology that computes it, which runs only if it is needed.
          due: whether to drop and grow now, whatever the schedule says.

        Returns:
          Weights, topology and state of the optimizer.

        Raises:
          ValueError: RigL without gradients.
        """
        if self.algorithm == STATIC:
            return weights, topology, opt_state
        if due is None:
            due = self.scheduler.is_mask_update_iter(step)

        def move(state: tuple[Any, Any, Any], step: Any) -> tuple[Any, Any, Any]:
            weights, topology, opt_state = state
            gradients = probe_grads(weights, topology) if callable(probe_grads) else probe_grads
            scores = GROW_SCORES[self.algorithm](self, step, gradients)
            fraction = self.drop_fraction_fn(step)
            checks.check_drop_fraction(fraction, f'drop_fraction_fn({step})')
            moved_weights, new_topology, places = {}, {}, {}
            for name, stored in self._stored(weights).items():
                layout = self.layouts[name]
                values, positions = stored[layout.values_key], topology[name]['positions']
                new, where = layout.replace(values, positions, scores[name], fraction)
                new_topology[name] = layout.topology(new)
                moved_weights[name] = {**stored, layout.values_key: moved(values, where)}
                # The term of low rank keeps its moments.
                places[name] = {**dict.fromkeys(stored, _STAYS), layout.values_key: where}
            stays = jax.tree.map(lambda _: _STAYS, self.products.params)
            opt_state = _move_moments(tx, opt_state, self.products.put(stays, places))
            return self.products.put(weights, moved_weights), new_topology, opt_state

        topology = {name: dict(arrays) for name, arrays in topology.items()}
        return control.run_once(due, move, (weights, topology, opt_state), step)

    def _check_optimizer(self, tx: optax.GradientTransformation, weights: Any) -> None:
        """Refuses an optimizer that would not take the step of the masked dense model; computes nothing."""
        compact = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
        whole = {}
        for name, stored in self._stored(compact).items():
            leaf = self.products.by_leaf[name]
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            whole[name] = {**stored, self.layouts[name].values_key: shape}
        if self.ever_moves:
            sparse_state_lib.check_restartable(tx, compact)
        check_elementwise(tx, self.products.put(compact, whole), compact)

    def _stored(self, weights: Any) -> dict[str, Any]:
        """The stored arrays of leaves that are stored compactly, by name."""
        by_name = self.products.by_name(weights)
        return {name: by_name[name] for name in self.layouts}


_STAYS = np.zeros((), np.int32)  # in the place of the positions of an array that does not move


def _move_moments(optimizer: optax.GradientTransformation, state: Any, places: Any) -> Any:
    """Moves the moments of kept weights, in the state of their optimizer, along with the weights.

    >>> tx, weights = optax.sgd(0.1, momentum=0.9), {'w': jnp.array([7.0, 8.0])}
    >>> state = tx.update(weights, tx.init(weights))[1]
    >>> _move_moments(tx, state, {'w': jnp.array([1, 2])})[0].trace
    {'w': Array([8., 0.], dtype=float32)}
    """

    def move(moment: Any, where: Any) -> Any:
        if not where.ndim or jnp.shape(moment)[: where.ndim] != where.shape:
            return moment
        return moved(moment, where)

    return tree_utils.tree_map_params(
        optimizer, move, state, places, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )


def drawn_positions(layouts: Mapping[str, Layout], rng_seed: Any) -> dict[str, np.ndarray]:
    """The positions at which training starts, drawn by NumPy: a generator of its own for each leaf."""
    if tree_lib.is_traced(rng_seed):
        raise TypeError(
            'rng_seed is traced, and positions are drawn by NumPy; make the model outside of jit'
        )
    words = [rng_seed]
    if rng_seed is None or isinstance(rng_seed, jax.Array | np.ndarray):
        words = np.asarray(jax.random.key_data(seeds.prng_key(rng_seed))).tolist()
    positions = {}
    for number, (name, layout) in enumerate(layouts.items()):
        positions[name] = layout.draw(np.random.default_rng([*words, number]))
    return positions


def check_moves(
    algorithm: str,
    scheduler: sparsity_schedules.BaseSchedule,
    drop_fraction_fn: Callable[[Any], Any],
    rng_seed: Any,
) -> None:
    """Refuses an unknown algorithm, a schedule whose sparsity changes, what is no seed, and fractions outside [0, 1].

    Fractions are checked at step 0, at the first updates, and at the last ones if the schedule has an end.
    """
    if algorithm not in ALGORITHMS:
        near = tree_lib.nearest(str(algorithm), ALGORITHMS)
        raise ValueError(f'algorithm {algorithm!r} does not train compact weights; {near}')
    target = 0.5
    for step in (0, 1, 1000):
        sparsity = float(scheduler.get_sparsity_at_step(target, step))
        if sparsity != target:
            raise ValueError(
                f'scheduler: {type(scheduler).__name__} changes the number of weights (it makes {sparsity:.3g} of the '
                f'target {target} at step {step}), and compact arrays keep their size; use PeriodicSchedule or '
                'StepsSchedule'
            )
    seeds.check_seed(rng_seed)
    updates: Any = checks.update_steps(scheduler)
    updates = range(_CHECKED_STEPS) if updates is None else updates
    has_end = getattr(scheduler, 'update_end_step', 0) is not None
    last = updates[-_CHECKED_STEPS:] if has_end else ()
    for step in (0, *updates[:_CHECKED_STEPS], *last):
        checks.check_drop_fraction(drop_fraction_fn(step), f'drop_fraction_fn({step})')
