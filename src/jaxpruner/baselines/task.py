"""What a workload is: a recipe and its data become a training, as pure functions of its state.

Since nothing here has a state of its own, many seeds and sparsities train in one compiled program. Batches come from
inside the program, or from a feed on the host.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
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
    size = _LARGEST_BATCH
    while len(labels) % size:
        size -= 1

    def in_batches(array):
        return array.reshape(-1, size, *array.shape[1:])

    def measure(batch):
        inputs, labels = batch
        return example_metrics(model(inputs), labels)

    batches = jax.tree.map(in_batches, (inputs, labels))
    metrics = jax.lax.map(measure, batches)
    return {name: values.mean() for name, values in metrics.items()}


def example_metrics(logits: jax.Array, labels: jax.Array) -> Metrics:
    """`accuracy`, which is 0 or 1, and `loss` in nats of each example, float32[n]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_right = logits.argmax(axis=-1) == labels
    return {'accuracy': is_right.astype(losses.dtype), 'loss': losses}


Values = Callable[[Any], np.ndarray]  # observations -> `Task.values` with the parameters of now


class Feed(Protocol):
    """Batches from the host, one for each step, in an order that can be taken up again."""

    def next(self, values: Values) -> Any:
        """The next batch: a pytree of NumPy arrays with the examples along the first axis.

        The arrays are not written to afterwards: the device may still read them. `values` is good
        until this returns; only players of games call it.
        """
        ...

    def state(self) -> dict[str, np.ndarray]:
        """Its position, and what else it keeps, for a checkpoint."""
        ...

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up a position from `state`, as a new feed of the same seed."""
        ...

    def close(self) -> None:
        """Ends threads and processes and closes files; the feed is not used afterwards."""
        ...


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


def no_state(params: Any, key: jax.Array) -> None:
    """The initial state of a task that carries nothing but parameters."""
    del params, key


class Task(NamedTuple):
    """One training as pure functions, made by a workload from a recipe and data."""

    metric: Metric
    steps: int  # updates of the optimizer
    init: Callable[[jax.Array], Any]  # key -> trained parameters
    loss: Callable[..., tuple[jax.Array, Any]]  # parameters, state, batch, key -> loss, state
    # Parameters, state -> scalars; the metric is among them.
    evaluate: Callable[..., Metrics]
    # Parameters, key -> what else is carried.
    init_state: Callable[[Any, jax.Array], Any] = no_state
    # Key of the step, step -> a batch, drawn inside the program; None with a feed or a step.
    batch: Callable[[jax.Array, jax.Array], Any] | None = None
    # Updater, tx, carry, step -> carry; in place of the generic step (federated rounds,
    # reinforcement learning). With a feed its batch comes last.
    step: Callable[..., Carry] | None = None
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER  # (path, leaf) -> whether it may be pruned
    # Seed -> a new feed, for batches from the host; a sweep then trains one cell at a time.
    feed: Callable[[int], Feed] | None = None
    # Forward parameters, observations -> what `Feed.next` may ask for.
    values: Callable[[Any, Any], Any] | None = None
    # In place of `evaluate`, played on the host: bound `values`, seed -> metrics.
    evaluate_host: Callable[[Values, int], dict[str, float]] | None = None
    # Test batches from the host: `evaluate` then gets each behind parameters and state, and
    # returns the metrics of each example, float[n]; their means are reported.
    tests: Callable[[], Iterator[Any]] | None = None


class Workload(Protocol):
    """A kind of model and data that algorithms are compared on; one file and one row of `WORKLOADS` each.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> WORKLOADS['vit'].name
    'vit'
    """

    @property
    def name(self) -> str:
        """As the command line calls it."""
        ...

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of its recipes."""
        ...

    def default(self, preset: str) -> Recipe:
        """The recipe of a preset.

        Args:
          preset: one of `presets`.

        Raises:
          ValueError: there is no such preset.
        """
        ...

    def data(self, recipe: Recipe, data_dir: Path | None) -> Any:
        """Reads the data that the recipe names.

        Args:
          recipe: its field `data` says which.
          data_dir: where it lies, `None` for data that come with a package.

        Returns:
          A pytree of arrays, or `None` for a task that makes its own data.

        Raises:
          ValueError: a file is missing or damaged.
        """
        ...

    def task(self, recipe: Recipe, data: Any) -> Task:
        """The training that the recipe describes.

        Compiled programs take the data as an argument and call this while they are traced: a
        program would contain the data that it closes over. So it may look at shapes, not at values.

        Args:
          recipe: model, batch size and steps.
          data: from `data`, or traced.
        """
        ...


class PresetRecipes:
    """The part of a workload that looks up its recipes by preset."""

    name: str
    recipes: Mapping[str, Recipe]  # by preset

    @property
    def presets(self) -> tuple[str, ...]:
        return tuple(self.recipes)

    def default(self, preset: str) -> Recipe:
        if preset not in self.recipes:
            nearest = tree_lib.nearest(preset, self.recipes)
            raise ValueError(f'{self.name} has no preset {preset!r}; {nearest}')
        return self.recipes[preset]


def require_folder(recipe: Recipe, folder: Path | None, content: str) -> Path:
    """The folder of data that lie in one; a `ValueError` where none was given."""
    if folder is None:
        raise ValueError(
            f'the preset {recipe.preset!r} of {recipe.workload} needs --data-dir: '
            f'a folder with {content}'
        )
    return Path(folder)
