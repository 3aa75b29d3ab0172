"""What a workload is: a recipe and its data become a training, described by pure functions of its state.

Since nothing here has a state of its own, many seeds and sparsities can be trained in one compiled program.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax

from jaxpruner.baselines.feeds import Feed, Values
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.sparsity_distributions import NOT_DIM_ONE_FILTER, FilterFn

STEPS = 2  # what a seed's key is folded with before the number of a step


class Metric(NamedTuple):
    """The number by which runs are compared.

    >>> Metric('accuracy', 'high').better
    'high'
    """

    name: str
    better: Literal['high', 'low']


class Carry(NamedTuple):
    """What a training step takes and returns; a pytree of arrays, so that it checkpoints, maps and vmaps.

    >>> Carry(params={}, state=None, opt_state=(), key=jax.random.key(0)).state is None
    True
    """

    params: Any  # the trained parameters
    state: Any  # what else the task carries, None for nothing
    opt_state: Any  # the optax state, with the masks in it
    key: jax.Array  # the typed key of the seed; it stays: a step folds its number in


def step_key(key: jax.Array, step: Any) -> jax.Array:
    """The key of a step; what else a seed's key is folded with are other numbers.

    Args:
      key: of the seed, from `Carry`.
      step: its number, int32 scalar.

    >>> step_key(jax.random.key(0), 3).shape
    ()
    """
    return jax.random.fold_in(jax.random.fold_in(key, STEPS), step)


class Task(NamedTuple):
    """One training as pure functions; a workload makes it from a recipe and data.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> recipe = WORKLOADS['resnet'].default('default')
    >>> task = WORKLOADS['resnet'].task(recipe, WORKLOADS['resnet'].data(recipe, None))
    >>> task.metric
    Metric(name='accuracy', better='high')
    """

    metric: Metric
    steps: int  # updates of the optimizer
    init: Callable[[jax.Array], Any]  # key -> trained parameters
    init_state: Callable[
        [Any, jax.Array], Any
    ]  # parameters, key -> what else is carried, may be None
    batch: Callable[
        [jax.Array, jax.Array], Any
    ]  # key of the step, step -> a batch, drawn inside the program
    loss: Callable[..., tuple[jax.Array, Any]]  # parameters, state, batch, key -> loss, state
    evaluate: Callable[
        ..., dict[str, jax.Array]
    ]  # parameters, state -> scalars; the metric is among them
    # updater, tx, carry, step -> carry; in place of the generic step (federated rounds, reinforcement learning). With a
    # feed its batch comes last.
    step: Callable[..., Carry] | None = None
    filter_fn: FilterFn = NOT_DIM_ONE_FILTER  # (path, leaf) -> whether it may be pruned
    # Where batches come from the host, `batch` is not used, and a sweep trains one cell at a time.
    feed: Callable[[int], Feed] | None = None  # seed -> a new feed
    values: Callable[[Any, Any], Any] | None = (
        None  # forward parameters, observations -> what `Feed.next` may ask for
    )
    # In place of `evaluate`, played on the host: `values` with the parameters bound, seed -> metrics.
    evaluate_host: Callable[[Values, int], dict[str, float]] | None = None
    # Test batches from the host: `evaluate` then gets each behind parameters and state, and returns the metrics of each
    # example, float[n]; their means are reported.
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

        Compiled programs take the data as an argument and call this while they are traced (data that a program closes
        over would be compiled into it). So it may look at shapes, not at values.

        Args:
          recipe: model, batch size and steps.
          data: from `data`, or traced.
        """
        ...
