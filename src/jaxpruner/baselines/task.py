"""What a workload is: a recipe and its data become a training, as pure functions of its state.

Since nothing here has a state of its own, many seeds and sparsities train in one compiled program. Batches come from
inside the program, or from a feed on the host.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.sparsity_distributions import NOT_DIM_ONE_FILTER, FilterFn

Metrics = dict[str, jax.Array]  # by name
_LARGEST_BATCH = 500


def classification_metrics(
    model: Callable[[jax.Array], jax.Array], inputs: Any, labels: Any
) -> Metrics:
    """Mean `accuracy` in [0, 1] and `loss` in nats over a test set, in batches of one size.

    `model` maps a batch of inputs to logits; `labels` are int32[tests].
    """
    size = next(size for size in range(_LARGEST_BATCH, 0, -1) if len(labels) % size == 0)
    batches = jax.tree.map(
        lambda array: array.reshape(-1, size, *array.shape[1:]), (inputs, labels)
    )
    metrics = jax.lax.map(lambda batch: example_metrics(model(batch[0]), batch[1]), batches)
    return {name: values.mean() for name, values in metrics.items()}


def example_metrics(logits: jax.Array, labels: jax.Array) -> Metrics:
    """`accuracy`, which is 0 or 1, and `loss` in nats of each example, float32[n]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_right = logits.argmax(axis=-1) == labels
    return {'accuracy': is_right.astype(losses.dtype), 'loss': losses}


# Inputs from the host -> `Task.values` of the model of now, as NumPy arrays.
Values = Callable[[Any], Any]
# Batches from the host, one for each step, in an order that can be taken up again:
# - next(values): the next batch, a pytree of NumPy arrays with the examples along the first axis, which are not written
#   to afterwards. `values` is good until this returns; only players of games call it.
# - state(): its position, and what else it keeps, for a checkpoint: NumPy arrays by name.
# - set_state(state): takes up a position, as a new feed of the same seed.
# - close(): ends threads and processes; the feed is not used afterwards.
Feed = Any
Examples = tuple[jax.Array, jax.Array]  # inputs, and what is to be said of them
STEPS = 2  # folded into a seed's key before the number of a step


class Metric(NamedTuple):
    """The number by which runs are compared."""

    name: str
    better: Literal['high', 'low']


class Carry(NamedTuple):
    """What a training step takes and returns: arrays alone, so that it checkpoints and vmaps."""

    params: Any  # the trained parameters
    state: Any  # what else the task carries, None for nothing
    opt_state: Any  # the optax state, with the masks in it
    key: jax.Array  # the typed key of the seed; it stays: a step folds its number in


def step_key(key: jax.Array, step: Any) -> jax.Array:
    """The key of a step, from the seed's key in `Carry`."""
    key_steps = jax.random.fold_in(key, STEPS)
    return jax.random.fold_in(key_steps, step)


def gradient_step(
    updater: Any, tx: Any, carry: Carry, loss: Callable[[Any], tuple[jax.Array, Any]]
) -> Carry:
    """A step of the wrapped optimizer; `loss` maps the parameters of the forward pass to the loss and the state."""

    def loss_of(params):
        return loss(updater.pre_forward_update(params, carry.opt_state))

    grads, state = jax.grad(loss_of, has_aux=True)(carry.params)
    updates, opt_state = tx.update(grads, carry.opt_state, carry.params)
    params: Any = optax.apply_updates(carry.params, updates)
    return carry._replace(params=params, state=state, opt_state=opt_state)


class Task(NamedTuple):
    """One training as pure functions, made by a workload from a recipe and data."""

    metric: Metric
    init: Callable[[jax.Array], Any]  # key -> trained parameters
    loss: Callable[..., tuple[jax.Array, Any]]  # parameters, state, batch, key -> loss, state
    # Parameters, state -> scalars; the metric is among them.
    evaluate: Callable[..., Metrics] | None = None
    # Parameters, key -> what else is carried.
    init_state: Callable[[Any, jax.Array], Any] = lambda params, key: None
    # Key of the step, step -> a batch, drawn inside the program; None with a feed or a step.
    batch: Callable[[jax.Array, jax.Array], Any] | None = None
    # Updater, tx, carry, step -> carry; in place of the generic step (federated rounds,
    # reinforcement learning). With a feed its batch comes last.
    step: Callable[..., Carry] | None = None
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER  # (path, leaf) -> whether it may be pruned
    # Seed -> a new feed, for batches from the host; a sweep then trains one cell at a time.
    feed: Callable[[int], Feed] | None = None
    # Forward parameters, state, inputs from the host -> arrays with a number for each input.
    values: Callable[[Any, Any, Any], Any] | None = None
    # In place of `evaluate`, on the host: bound `values`, seed -> metrics.
    evaluate_host: Callable[[Values, int], dict[str, float]] | None = None


class Workload:
    """A kind of model and data that algorithms are compared on; one file and one row of `WORKLOADS` each.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> WORKLOADS['vit'].name, WORKLOADS['vit'].presets
    ('vit', ('data', 'default', 'full'))
    """

    name: str  # as the command line calls it
    recipes: Mapping[str, Recipe]  # by preset

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of its recipes."""
        return tuple(self.recipes)

    def default(self, preset: str) -> Recipe:
        """The recipe of a preset; a `ValueError` where there is no such preset."""
        if preset not in self.recipes:
            nearest = tree_lib.nearest(preset, self.recipes)
            raise ValueError(f'{self.name} has no preset {preset!r}; {nearest}')
        return self.recipes[preset]

    def data(self, recipe: Recipe, data_dir: Path | None) -> Any:
        """Reads the data that `recipe.data` names, from a folder or from a package.

        Returns a pytree of arrays, or `None` for a task that makes its own data. A file that is missing or damaged is a
        `ValueError`.
        """
        raise NotImplementedError

    def task(self, recipe: Recipe, data: Any) -> Task:
        """The training that the recipe describes, on data from `data`.

        Compiled programs take the data as an argument and call this while they are traced: a
        program would contain the data that it closes over. So it may look at shapes, not at values.
        """
        raise NotImplementedError
