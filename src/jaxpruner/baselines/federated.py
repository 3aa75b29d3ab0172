"""The workload `federated`: federated averaging over clients whose data differ, on images of digits.

Each client trains alone for some steps of SGD; the mean of what they changed is the gradient that the server's wrapped
optimizer gets. Masks live on the server: clients begin with its pruned weights and change them all (McMahan et al.
2017, https://arxiv.org/abs/1602.05629; server optimizers: Reddi et al. 2021, https://arxiv.org/abs/2003.00295).
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
from jaxpruner.baselines.federated_model import ClientCNN
from jaxpruner.baselines.feeds import Feed
from jaxpruner.baselines.metrics import classification_metrics, example_metrics
from jaxpruner.baselines.models import Functional
from jaxpruner.baselines.readers import pipelines
from jaxpruner.baselines.readers.clients import Client, ClientFiles, read_emnist
from jaxpruner.baselines.readers.pipelines import Reader
from jaxpruner.baselines.recipe import Optimizer, Pruning, Recipe, Schedule
from jaxpruner.baselines.task import Carry, Metric, Task, step_key
from jaxpruner.core import tree as tree_lib

_TESTS = 500  # in a batch


class Clients(NamedTuple):
    """Images and labels of each client, and those of the test; a pytree of arrays."""

    images: jax.Array | np.ndarray  # float32[clients, examples, height, width, 1]
    labels: jax.Array | np.ndarray  # int32[clients, examples]
    x_test: jax.Array | np.ndarray  # float32[tests, height, width, 1]
    y_test: jax.Array | np.ndarray  # int32[tests]


def split_by_label(labels: Any, clients: int, shards: int, seed: int = 0) -> np.ndarray:
    """Gives each client a few shards of the examples sorted by label, so that it has few of the labels.

    >>> sorted(split_by_label(np.array([1, 0, 1, 0]), clients=2, shards=1).tolist())
    [[0, 2], [1, 3]]
    """
    size = len(labels) // (clients * shards)
    if not size:
        raise ValueError(
            f'{len(labels)} examples cannot be cut into {clients} x {shards} shards: set task.clients or task.shards '
            'to less'
        )
    order = np.argsort(np.asarray(labels), kind='stable')[: size * clients * shards].reshape(
        -1, size
    )
    return np.random.default_rng(seed).permutation(order).reshape(clients, -1)


class FederatedWorkload:
    """Federated averaging; the metric is the accuracy of the server's model. A step is a round."""

    name = 'federated'
    presets = ('default', 'data', 'full')

    def default(self, preset: str) -> Recipe:
        """As `Workload.default`: clients of digits, of MNIST, or the writers of EMNIST."""
        if preset not in _RECIPES:
            raise ValueError(
                f'{self.name} has no preset {preset!r}; {tree_lib.nearest(preset, _RECIPES)}'
            )
        return _RECIPES[preset]

    def data(self, recipe: Recipe, data_dir: Path | None) -> Clients | ClientFiles:
        """As `Workload.data`: digits need no folder, MNIST and EMNIST do; the clients of EMNIST stay on disk."""
        if recipe.data not in ('digits', 'mnist', 'emnist'):
            known = "'digits', 'mnist' and 'emnist' are read"
            raise ValueError(f'data {recipe.data!r} cannot be read by federated: {known}')
        if recipe.data != 'digits' and data_dir is None:
            what = recipe.data.upper()
            raise ValueError(
                f'the preset {recipe.preset!r} of federated needs --data-dir: a folder with {what}'
            )
        if recipe.data == 'digits':
            data_lib.check_no_folder(recipe.data, data_dir)
        if data_dir and recipe.data == 'emnist':
            return read_emnist(Path(data_dir))
        images = data_lib.load_mnist(Path(data_dir)) if data_dir else data_lib.load_digits()
        numbers: Any = recipe.task
        places = split_by_label(images.y_train, numbers['clients'], numbers['shards'])
        return Clients(images.x_train[places], images.y_train[places], images.x_test, images.y_test)

    def task(self, recipe: Recipe, data: Clients | ClientFiles) -> Task:
        """The training."""
        numbers: Any = recipe.task
        sizes: Any = recipe.model
        if isinstance(data, ClientFiles):  # of each client, all are taken again and again
            clients, examples, side = len(data.clients), recipe.batch_size, data.x_test.shape[1]
        else:
            clients, examples, side = data.images.shape[:3]
        if not 1 <= numbers['clients_per_round'] <= clients:
            raise ValueError(
                f'task.clients_per_round must lie in 1 to {clients}, got {numbers["clients_per_round"]}'
            )
        if recipe.batch_size > examples:
            raise ValueError(
                f'batch_size must be at most {examples}, what a client has; got {recipe.batch_size}'
            )
        model = Functional(
            lambda rngs: ClientCNN(side, **sizes, dtype=jnp.dtype(recipe.dtype), rngs=rngs)
        )
        rounds = _Rounds(recipe, data, model)
        task = Task(
            metric=Metric('accuracy', 'high'),
            steps=recipe.steps,
            init=lambda key: model.init(key)[0],
            init_state=lambda params, key: None,
            batch=lambda key, number: None,
            loss=rounds.loss,
            evaluate=rounds.evaluate,
            step=rounds.step,
        )
        if not isinstance(data, ClientFiles):
            return task
        return task._replace(
            evaluate=rounds.evaluate_batch,
            step=rounds.fed_step,
            feed=rounds.feed,
            tests=rounds.tests,
        )


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The functions of a task."""

    recipe: Recipe
    data: Any  # Clients, or ClientFiles
    model: Functional

    @property
    def numbers(self) -> Any:
        return self.recipe.task

    def loss(
        self, params: Any, state: Any, batch: tuple[jax.Array, jax.Array], key: Any
    ) -> tuple[jax.Array, Any]:
        images, labels = batch
        logits = self.model.module(params)(images, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    def train_client(self, params: Any, client: jax.Array, key: jax.Array) -> Any:
        """The parameters after a client's steps: through its examples in a random order, again and again."""
        images, labels, size = (
            jnp.asarray(self.data.images),
            jnp.asarray(self.data.labels),
            self.recipe.batch_size,
        )
        key_order, key_loss = jax.random.split(key)
        order = jax.random.permutation(key_order, images.shape[1])
        places = order[jnp.arange(self.numbers['local_steps'] * size) % len(order)]
        return self.train(params, (images[client, places], labels[client, places]), key_loss)

    def train(self, params: Any, examples: tuple[jax.Array, jax.Array], key_loss: jax.Array) -> Any:
        """The parameters after steps over examples, which lie one batch behind the other."""
        size = self.recipe.batch_size
        local = optax.sgd(self.numbers['client_learning_rate'])

        def step(number: jax.Array, params: Any) -> Any:
            batch = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, number * size, size), examples
            )
            grads = jax.grad(
                lambda p: self.loss(p, None, batch, jax.random.fold_in(key_loss, number))[0]
            )(params)
            return optax.apply_updates(params, local.update(grads, local.init(params))[0])

        return jax.lax.fori_loop(0, self.numbers['local_steps'], step, params)

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A round: some clients train, and the mean of what they changed is the server's gradient."""
        key_choice, key_train = jax.random.split(step_key(carry.key, number))
        clients, chosen_number = len(self.data.images), self.numbers['clients_per_round']
        chosen = jax.random.choice(key_choice, clients, (chosen_number,), replace=False)
        keys = jax.random.split(key_train, chosen_number)
        return self._round(
            updater,
            tx,
            carry,
            lambda sent: jax.vmap(self.train_client, (None, 0, 0))(sent, chosen, keys),
        )

    def fed_step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array, batch: Any) -> Carry:
        """The same with the examples of the clients as a batch."""
        keys = jax.random.split(step_key(carry.key, number), self.numbers['clients_per_round'])
        return self._round(
            updater, tx, carry, lambda sent: jax.vmap(self.train, (None, 0, 0))(sent, batch, keys)
        )

    def _round(self, updater: Any, tx: Any, carry: Carry, train: Callable[[Any], Any]) -> Carry:
        sent = updater.pre_forward_update(carry.params, carry.opt_state)
        trained = train(sent)
        change = jax.tree.map(lambda old, new: (old - new).mean(axis=0), sent, trained)
        updates, opt_state = tx.update(change, carry.opt_state, carry.params)
        return carry._replace(
            params=optax.apply_updates(carry.params, updates), opt_state=opt_state
        )

    def evaluate(self, params: Any, state: Any) -> dict[str, jax.Array]:
        del state
        return classification_metrics(self.model.module(params), self.data.x_test, self.data.y_test)

    def evaluate_batch(
        self, params: Any, state: Any, batch: tuple[jax.Array, jax.Array]
    ) -> dict[str, jax.Array]:
        del state
        return example_metrics(self.model.module(params)(batch[0]), batch[1])

    def tests(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(self.data.y_test), _TESTS):
            yield self.data.x_test[start : start + _TESTS], self.data.y_test[start : start + _TESTS]

    def feed(self, seed: int) -> Feed:
        clients, number = self.data.clients, self.numbers['clients_per_round']
        size = self.recipe.batch_size * self.numbers['local_steps']
        return pipelines.numbered(
            lambda place: examples_of_round(
                np.random.default_rng((seed, place)), clients, number, size
            )
        )


def examples_of_round(
    random: np.random.Generator, clients: Reader[Client], number: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws clients, and puts the examples of each in a random order.

    >>> clients = [Client(np.zeros((3, 28, 28, 1)), np.array([4, 5, 6]))]
    >>> sorted(examples_of_round(np.random.default_rng(0), clients, 1, 6)[1][0].tolist())
    [4, 4, 5, 5, 6, 6]
    """
    chosen = [clients[int(index)] for index in random.choice(len(clients), number, replace=False)]
    places = [
        random.permutation(len(client.labels))[np.arange(size) % len(client.labels)]
        for client in chosen
    ]
    pairs = [
        (client.images[place], client.labels[place])
        for client, place in zip(chosen, places, strict=True)
    ]
    images, labels = map(np.stack, zip(*pairs, strict=True))
    return images, labels


_DIGITS = Recipe(
    workload='federated',
    steps=300,
    batch_size=16,
    optimizer=Optimizer('adam', learning_rate=3e-3),
    schedule=Schedule(decay='cosine'),
    # As the other image workloads. It was uniform until one seed at 95 % had shown most algorithms collapse.
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
_MNIST: dict[str, Any] = {'preset': 'data', 'data': 'mnist', 'steps': 500, 'batch_size': 20}
_RECIPES = {
    'default': _DIGITS,
    'data': _DIGITS.updated(
        {**_MNIST, 'task': {'clients': 100, 'clients_per_round': 10, 'local_steps': 10}}
    ),
    # The rates that FedJAX's example has for EMNIST; ten clients a round and its 62 classes.
    'full': dataclasses.replace(
        _DIGITS,
        preset='full',
        data='emnist',
        steps=1500,
        batch_size=20,
        eval_every=0.01,
        optimizer=Optimizer('adam', learning_rate=10**-2.5),
        schedule=Schedule(decay='constant'),
        model={'filters': (32, 64), 'hidden': 128, 'classes': 62, 'dropout': (0.25, 0.5)},
        task={
            'clients': 3400,
            'shards': 2,
            'clients_per_round': 10,
            'local_steps': 10,
            'client_learning_rate': 10**-1.5,
        },
    ),
}
