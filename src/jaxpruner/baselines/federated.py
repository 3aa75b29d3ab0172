"""The workload `federated`: federated averaging over clients with different data, on digits.

Each client trains alone for some steps of SGD; the mean of what they changed is the gradient that
the server's wrapped optimizer gets. Masks live on the server: clients begin with its pruned weights
and change all weights (McMahan et al. 2017, https://arxiv.org/abs/1602.05629; server optimizers:
Reddi et al. 2021, https://arxiv.org/abs/2003.00295).
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.baselines import task as task_lib
from jaxpruner.baselines.data import load_images, require_folder
from jaxpruner.baselines.models import ConvNet, Functional
from jaxpruner.baselines.readers import read_emnist
from jaxpruner.baselines.recipe import Recipe, read_presets
from jaxpruner.baselines.task import Carry, Examples, Metric, Metrics, Task, Workload

Array = jax.Array | np.ndarray


class Clients(NamedTuple):
    """What clients have, and what is for testing; a pytree of arrays."""

    images: Array  # float32[examples, height, width, 1]
    labels: Array  # int32[examples]
    members: Array  # int32[clients, longest]: the examples of each client, then anything
    counts: Array  # int32[clients]: how many there are
    x_test: Array  # float32[tests, height, width, 1]
    y_test: Array  # int32[tests]


class FederatedWorkload(Workload):
    """Federated averaging; the metric is the accuracy of the server's model. A step is a round.

    The presets train clients of digits, of MNIST, or the writers of EMNIST.
    """

    name = 'federated'
    recipes = read_presets('federated')

    def data(self, recipe: Recipe, data_dir: Path | None) -> Clients:
        """As `Workload.data`."""
        if recipe.data == 'emnist':
            return _read_writers(require_folder(recipe, data_dir, 'EMNIST'))
        images = load_images(recipe, data_dir, 'emnist')
        clients, shards = recipe.task['clients'], recipe.task['shards']
        members = split_by_label(images.y_train, clients, shards)
        counts = np.full(len(members), members.shape[1])
        examples = images.x_train, images.y_train
        return Clients(*examples, members, counts, images.x_test, images.y_test)

    def task(self, recipe: Recipe, data: Clients) -> Task:
        """As `Workload.task`; `recipe.batch_size` is that of a client's step."""
        sizes: Any = {**recipe.model, 'dtype': jnp.dtype(recipe.dtype)}
        # Two convolutions of 3 x 3, and a pooling.
        sizes |= {'outputs': sizes.pop('classes'), 'kernel_sizes': (3, 3), 'strides': (1, 1)}
        shape = data.images.shape[1:]
        model = Functional(lambda rngs: ConvNet(shape, pool=2, **sizes, rngs=rngs))
        rounds = _Rounds(recipe, data, model)
        return Task(
            metric=Metric('accuracy', 'high'),
            init=model.init_params,
            loss=rounds.loss,
            evaluate=rounds.evaluate,
            step=rounds.step,
        )


def _read_writers(folder: Path) -> Clients:
    """The writers of EMNIST; those who are only tested are one test set."""
    paths = [folder / f'federated_emnist_{part}.sqlite' for part in ('train', 'test')]
    train, test = map(read_emnist, paths)
    counts = np.array([len(labels) for _, labels in train])
    members = (np.cumsum(counts) - counts)[:, None] + np.arange(counts.max())
    images, labels = map(np.concatenate, zip(*train, strict=True))
    tests = map(np.concatenate, zip(*test, strict=True))
    examples = jnp.asarray(images), jnp.asarray(labels)
    return Clients(*examples, members.astype(np.int32), counts, *map(jnp.asarray, tests))


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
    all_shards = order[: size * clients * shards].reshape(-1, size)
    return np.random.default_rng(seed).permutation(all_shards).reshape(clients, -1)


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The functions of a task."""

    recipe: Recipe
    data: Clients
    model: Functional

    def loss(self, params: Any, state: Any, batch: Examples, key: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        logits = self.model.module(params)(images, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    def train_client(self, params: Any, client: jax.Array, key: jax.Array) -> Any:
        """The parameters after a client's steps of SGD: through its examples in a random order, repeated."""
        members, count = jnp.asarray(self.data.members), jnp.asarray(self.data.counts)[client]
        images, labels = jnp.asarray(self.data.images), jnp.asarray(self.data.labels)
        size, steps = self.recipe.batch_size, self.recipe.task['local_steps']
        key_order, key_loss = jax.random.split(key)
        order = jax.random.permutation(key_order, members.shape[1])
        order = order[jnp.argsort(order >= count)]  # stable: those of the client, as drawn
        examples = members[client, order[jnp.arange(steps * size) % count]]
        sgd = optax.sgd(self.recipe.task['client_learning_rate'])

        def step(number, params):
            chosen = jax.lax.dynamic_slice_in_dim(examples, number * size, size)

            def loss(params):
                key = jax.random.fold_in(key_loss, number)
                return self.loss(params, None, (images[chosen], labels[chosen]), key)[0]

            updates, _ = sgd.update(jax.grad(loss)(params), sgd.init(params))
            return optax.apply_updates(params, updates)

        return jax.lax.fori_loop(0, steps, step, params)

    def step(self, updater: Any, tx: Any, carry: Carry, number: jax.Array) -> Carry:
        """A round: some clients train, and the mean of what they changed is the server's gradient."""
        key_choice, key_train = jax.random.split(task_lib.step_key(carry.key, number))
        count = self.recipe.task['clients_per_round']
        clients = jax.random.choice(key_choice, len(self.data.members), (count,), replace=False)
        keys = jax.random.split(key_train, count)
        sent = updater.pre_forward_update(carry.params, carry.opt_state)
        trained = jax.vmap(self.train_client, (None, 0, 0))(sent, clients, keys)
        change = jax.tree.map(lambda old, new: (old - new).mean(axis=0), sent, trained)
        updates, opt_state = tx.update(change, carry.opt_state, carry.params)
        params: Any = optax.apply_updates(carry.params, updates)
        return carry._replace(params=params, opt_state=opt_state)

    def evaluate(self, params: Any, state: Any) -> Metrics:
        del state
        tests = self.data.x_test, self.data.y_test
        return task_lib.classification_metrics(self.model.module(params), *tests)
