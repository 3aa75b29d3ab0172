"""The workload `federated`: federated averaging over clients with different data, on digits.

Each client trains alone for some steps of SGD; the mean of what they changed is the gradient that
the server's wrapped optimizer gets. Masks live on the server: clients begin with its pruned weights
and change all weights (McMahan et al. 2017, https://arxiv.org/abs/1602.05629; server optimizers:
Reddi et al. 2021, https://arxiv.org/abs/2003.00295).
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines import data as data_lib
from jaxpruner.baselines import readers as pipelines
from jaxpruner.baselines.models import ClientCNN, Functional
from jaxpruner.baselines.readers import Client, ClientFiles, Reader, read_emnist
from jaxpruner.baselines.recipe import Optimizer, Pruning, Recipe, Schedule
from jaxpruner.baselines.task import (
    Carry,
    Examples,
    Feed,
    Metric,
    Metrics,
    PresetRecipes,
    Task,
    classification_metrics,
    example_metrics,
    require_folder,
    step_key,
)

Array = jax.Array | np.ndarray
_TEST_BATCH = 500
_DEFAULT = Recipe(
    workload='federated',
    steps=300,
    batch_size=16,
    optimizer=Optimizer('adam', learning_rate=3e-3),
    schedule=Schedule(decay='cosine'),
    # It was uniform until one seed at 95 % had shown most algorithms collapse.
    pruning=Pruning(distribution='erk'),
    model={'filters': (16, 32), 'hidden': 64, 'classes': 10, 'dropout': (0.0, 0.0)},
    task={
        'clients': 20,
        'shards': 2,
        'clients_per_round': 5,
        'local_steps': 4,
        'client_learning_rate': 0.05,
    },
)
_MNIST = {
    'preset': 'data',
    'data': 'mnist',
    'steps': 500,
    'batch_size': 20,
    'task': {'clients': 100, 'clients_per_round': 10, 'local_steps': 10},
}
# The rates that FedJAX's example has for EMNIST; ten clients a round and its 62 classes.
_EMNIST = {
    'preset': 'full',
    'data': 'emnist',
    'steps': 1500,
    'batch_size': 20,
    'eval_every': 0.01,
    'optimizer': {'learning_rate': 10**-2.5},
    'schedule': {'decay': 'constant'},
    'model': {'filters': (32, 64), 'hidden': 128, 'classes': 62, 'dropout': (0.25, 0.5)},
    'task': {
        'clients': 3400,
        'clients_per_round': 10,
        'local_steps': 10,
        'client_learning_rate': 10**-1.5,
    },
}
_RECIPES = {
    'default': _DEFAULT,
    'data': _DEFAULT.updated(_MNIST),
    'full': _DEFAULT.updated(_EMNIST),
}


class Clients(NamedTuple):
    """Images and labels of each client, and those of the test; a pytree of arrays."""

    images: Array  # float32[clients, examples, height, width, 1]
    labels: Array  # int32[clients, examples]
    x_test: Array  # float32[tests, height, width, 1]
    y_test: Array  # int32[tests]


class FederatedWorkload(PresetRecipes):
    """Federated averaging; the metric is the accuracy of the server's model. A step is a round.

    The presets train clients of digits, of MNIST, or the writers of EMNIST.
    """

    name = 'federated'
    recipes = _RECIPES

    def data(self, recipe: Recipe, data_dir: Path | None) -> Clients | ClientFiles:
        """As `Workload.data`; the clients of EMNIST stay on disk."""
        if recipe.data == 'emnist':
            return read_emnist(require_folder(recipe, data_dir, 'EMNIST'))
        if recipe.data == 'mnist':
            images = data_lib.load_mnist(require_folder(recipe, data_dir, 'MNIST'))
        elif recipe.data == 'digits':
            data_lib.check_no_folder(recipe.data, data_dir)
            images = data_lib.load_digits()
        else:
            raise ValueError(
                f"data {recipe.data!r} cannot be read by federated: 'digits', 'mnist' and "
                "'emnist' are read"
            )
        numbers: Any = recipe.task
        indices = split_by_label(images.y_train, numbers['clients'], numbers['shards'])
        train = images.x_train[indices], images.y_train[indices]
        return Clients(*train, images.x_test, images.y_test)

    def task(self, recipe: Recipe, data: Clients | ClientFiles) -> Task:
        """As `Workload.task`; `recipe.batch_size` is that of a client's step.

        Raises a `ValueError` for a round with more clients than there are, or a batch with more
        examples than a client has.
        """
        numbers: Any = recipe.task
        sizes: Any = recipe.model
        if isinstance(data, ClientFiles):  # of each client, all are taken again and again
            clients = len(data.clients)
            examples = recipe.batch_size
            side = data.x_test.shape[1]
        else:
            clients, examples, side = data.images.shape[:3]
        chosen = numbers['clients_per_round']
        if not 1 <= chosen <= clients:
            raise ValueError(f'task.clients_per_round must lie in 1 to {clients}, got {chosen}')
        if recipe.batch_size > examples:
            raise ValueError(
                f'batch_size must be at most {examples}, what a client has; got {recipe.batch_size}'
            )
        dtype = jnp.dtype(recipe.dtype)

        def make(rngs):
            return ClientCNN(side, **sizes, dtype=dtype, rngs=rngs)

        model = Functional(make)
        rounds = _Rounds(recipe, data, model)
        task = Task(
            metric=Metric('accuracy', 'high'),
            steps=recipe.steps,
            init=model.init_params,
            loss=rounds.loss,
            evaluate=rounds.evaluate,
            step=rounds.step,
        )
        if not isinstance(data, ClientFiles):
            return task
        return task._replace(
            evaluate=rounds.evaluate_batch,
            step=rounds.step_on_batch,
            feed=rounds.feed,
            tests=rounds.tests,
        )


def split_by_label(labels: Any, clients: int, shards: int, seed: int = 0) -> np.ndarray:
    """Gives each client a few shards of the examples sorted by label, so that it has few labels.

    Returns indices int[clients, examples of a client]; what does not divide is left over.

    >>> sorted(split_by_label(np.array([1, 0, 1, 0]), clients=2, shards=1).tolist())
    [[0, 2], [1, 3]]
    """
    size = len(labels) // (clients * shards)
    if not size:
        raise ValueError(
            f'{len(labels)} examples cannot be cut into {clients} x {shards} shards: set '
            'task.clients or task.shards to less'
        )
    order = np.argsort(np.asarray(labels), kind='stable')
    used = order[: size * clients * shards]
    all_shards = used.reshape(-1, size)
    shuffled = np.random.default_rng(seed).permutation(all_shards)
    return shuffled.reshape(clients, -1)


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The functions of a task."""

    recipe: Recipe
    data: Any  # Clients, or ClientFiles
    model: Functional

    @property
    def numbers(self) -> Any:
        return self.recipe.task

    def loss(self, params: Any, state: Any, batch: Examples, key: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        model = self.model.module(params)
        logits = model(images, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), state

    def train_client(self, params: Any, client: jax.Array, key: jax.Array) -> Any:
        """The parameters after a client's steps: through its examples in a random order, repeated."""
        images = jnp.asarray(self.data.images)
        labels = jnp.asarray(self.data.labels)
        key_order, key_loss = jax.random.split(key)
        order = jax.random.permutation(key_order, images.shape[1])
        count = self.numbers['local_steps'] * self.recipe.batch_size
        positions = jnp.arange(count)
        indices = order[positions % len(order)]
        examples = images[client, indices], labels[client, indices]
        return self.train(params, examples, key_loss)

    def train(self, params: Any, examples: Examples, key_loss: jax.Array) -> Any:
        """The parameters after steps over examples, batch after batch."""
        size = self.recipe.batch_size
        sgd = optax.sgd(self.numbers['client_learning_rate'])

        def step(number, params):
            def cut(leaf):
                return jax.lax.dynamic_slice_in_dim(leaf, number * size, size)

            def loss(params):
                key = jax.random.fold_in(key_loss, number)
                return self.loss(params, None, batch, key)[0]

            batch = jax.tree.map(cut, examples)
            grads = jax.grad(loss)(params)
            updates, _ = sgd.update(grads, sgd.init(params))
            return optax.apply_updates(params, updates)

        return jax.lax.fori_loop(0, self.numbers['local_steps'], step, params)

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A round: some clients train, and the mean of what they changed is the server's gradient."""
        key = step_key(carry.key, number)
        key_choice, key_train = jax.random.split(key)
        count = self.numbers['clients_per_round']
        all_clients = len(self.data.images)
        clients = jax.random.choice(key_choice, all_clients, (count,), replace=False)
        keys = jax.random.split(key_train, count)

        def train(params):
            train_clients = jax.vmap(self.train_client, (None, 0, 0))
            return train_clients(params, clients, keys)

        return _round(updater, tx, carry, train)

    def step_on_batch(
        self, updater: Any, tx: Any, carry: Carry, number: jax.Array, batch: Any
    ) -> Carry:
        """A round with the examples of the clients as a batch."""
        key = step_key(carry.key, number)
        keys = jax.random.split(key, self.numbers['clients_per_round'])

        def train(params):
            train_clients = jax.vmap(self.train, (None, 0, 0))
            return train_clients(params, batch, keys)

        return _round(updater, tx, carry, train)

    def evaluate(self, params: Any, state: Any) -> Metrics:
        del state
        model = self.model.module(params)
        return classification_metrics(model, self.data.x_test, self.data.y_test)

    def evaluate_batch(self, params: Any, state: Any, batch: Examples) -> Metrics:
        del state
        images, labels = batch
        model = self.model.module(params)
        return example_metrics(model(images), labels)

    def tests(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(self.data.y_test), _TEST_BATCH):
            part = slice(start, start + _TEST_BATCH)
            yield self.data.x_test[part], self.data.y_test[part]

    def feed(self, seed: int) -> Feed:
        clients = self.data.clients
        count = self.numbers['clients_per_round']
        size = self.recipe.batch_size * self.numbers['local_steps']

        def make(number):
            random = np.random.default_rng((seed, number))
            return _examples_of_round(random, clients, count, size)

        return pipelines.numbered(make)


def _round(updater: Any, tx: Any, carry: Carry, train: Callable[[Any], Any]) -> Carry:
    """Updates the server; `train` maps the sent parameters to those of each client."""
    sent = updater.pre_forward_update(carry.params, carry.opt_state)
    trained = train(sent)

    def mean_change(old, new):
        return (old - new).mean(axis=0)

    change = jax.tree.map(mean_change, sent, trained)
    updates, opt_state = tx.update(change, carry.opt_state, carry.params)
    params = optax.apply_updates(carry.params, updates)
    return carry._replace(params=params, opt_state=opt_state)


def _examples_of_round(
    random: np.random.Generator, clients: Reader[Client], count: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws clients, and `size` examples of each in a random order, repeated where it has fewer.

    Returns images float32[count, size, 28, 28, 1] and labels int32[count, size].
    """
    numbers = random.choice(len(clients), count, replace=False)
    chosen = [clients[int(number)] for number in numbers]
    images, labels = [], []
    for client in chosen:
        order = random.permutation(len(client.labels))
        indices = order[np.arange(size) % len(order)]
        images.append(client.images[indices])
        labels.append(client.labels[indices])
    return np.stack(images), np.stack(labels)
