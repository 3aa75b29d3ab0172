"""Removes channels from a convolutional network while it trains, until at most a quarter of its FLOPs is left.

    python examples/shrink_cnn.py                      # scikit-learn's digits, a minute
    python examples/shrink_cnn.py --data-dir folder    # MNIST, three seeds
    python examples/shrink_cnn.py --load out/shrink_cnn/digits_1000_0.safetensors

Three networks train for as many steps: the whole one, one of which channels are removed, and one that had the small
shape from the beginning. The second is then made smaller, saved, and loaded in a process of its own. `--out` gets a
JSON file for each seed. Ctrl-C loses no more than the seed that is being trained: the same command goes on.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn

import jaxpruner
from jaxpruner.files import atomic_files
from jaxpruner.progress import progress_bar
from mnist_strategies_data import Dataset, load_dataset

REFUSED = 2  # the exit status of a program that was called wrongly
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
WIDTHS = 16, 32, 64
BUDGET = 'flops=0.25'
BATCH_SIZE = 128
UPDATES = 50  # of masks could be made in a run; the schedule uses those from the 10th to the 30th
NEAR_TIE = 1e-4  # the two largest logits are less apart
ROWS = {
    'dense': 'dense',
    'pruned': 'channels removed while training',
    'small': 'small from the beginning, trained as long',
}
# 97.5 % of Student's distribution lie below, by degrees of freedom; beyond it is that of the normal distribution.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}

Apply = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Removes channels from a convolutional network while it trains, and then for good."""

    data_dir: Path | None = None
    """Folder with MNIST (mnist.npz, or its four files); none: scikit-learn's digits."""
    out: Path = Path('out/shrink_cnn')
    """Folder for the results and the small models."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and batches."""
    steps: int = 1000
    """Of training, for each network."""
    load: Path | None = None
    """Train nothing: load a small model that was saved, and print its accuracy."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""

    def check(self) -> None:
        """Refuses wrong settings before any work, with a ValueError that names the value and the remedy."""
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f'--seeds must be different whole numbers from 0 on, got {self.seeds}')
        if self.steps < UPDATES or self.steps % UPDATES:
            raise ValueError(f'--steps must be a multiple of {UPDATES}, got {self.steps}')


class Network(nn.Module):
    """Two convolutions and two dense layers."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for width in self.widths[:2]:
            x = nn.relu(nn.Conv(width, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(self.widths[2])(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class Experiment:
    """The networks of one set of images."""

    def __init__(self, settings: Settings, data: Dataset):
        self.settings = settings
        self.data = data
        self.images = jnp.asarray(data.x_test)
        start = jax.eval_shape(functools.partial(self.start, WIDTHS), 0)
        self.graph = jaxpruner.channel_groups(apply, start, self.images)

    def start(self, widths: Sequence[int], seed: int) -> Any:
        """Parameters drawn for a network of these widths."""
        network = Network(tuple(widths))
        return network.init(jax.random.key(seed), self.images[:1])

    def train(
        self, name: str, apply_fn: Apply, optimizer: Any, params: Any, seed: int
    ) -> tuple[Any, Any]:
        """Trains parameters; returns them and the state of the optimizer."""
        images, labels = jnp.asarray(self.data.x_train), jnp.asarray(self.data.y_train)

        def loss(params: Any, rows: jax.Array) -> jax.Array:
            logits = apply_fn(params, images[rows])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

        @jax.jit
        def step(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
            rows = jax.random.randint(key, (BATCH_SIZE,), 0, len(labels))
            gradients = jax.grad(loss)(params, rows)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        key = jax.random.key(seed)
        with progress_bar(self.settings.steps, self.settings.progress) as show:
            for number in range(self.settings.steps):
                key_of_step = jax.random.fold_in(key, number)
                params, state = step(params, state, key_of_step)
                show(f'seed {seed}: {name}', number + 1, params)
        return params, state

    def pruner(self, params: Any) -> Any:
        """Removes channels while a network trains, the same share of each layer, until the budget is met."""
        choice = self.graph.choose(params, BUDGET)
        shares = []
        for name, kept in choice.keep.items():
            shares.append(len(kept) / choice.sizes[name])
        period = self.settings.steps // UPDATES
        return jaxpruner.MagnitudePruning(
            sparsity=1 - min(shares),
            sparsity_type=jaxpruner.structure.GroupedChannels(self.graph),
            scheduler=jaxpruner.PolynomialSchedule(period, 10 * period, 30 * period),
        )

    def run(self, seed: int, path: Path) -> dict[str, Any]:
        """Trains the networks of a seed, and saves the small one; returns what was measured."""
        graph = self.graph
        rate = optax.cosine_decay_schedule(2e-3, self.settings.steps)
        start = self.start(WIDTHS, seed)
        dense, _ = self.train('dense', apply, optax.adam(rate), start, seed)

        optimizer = self.pruner(start).wrap_optax(optax.adam(rate))
        pruned, state = self.train('pruned', apply, optimizer, start, seed)
        keep = graph.nonzero_channels(state)
        cut = graph.shrink(pruned, keep)
        small_apply = graph.small_apply(keep)
        jaxpruner.save_small_model(graph, cut, keep, path)

        widths = [len(keep[name]) for name in graph.groups]
        small_start = self.start(widths, seed)
        small, _ = self.train('small', apply, optax.adam(rate), small_start, seed)

        accuracies = {
            'dense': self.accuracy(apply, dense),
            'pruned': self.accuracy(apply, pruned),
            'small': self.accuracy(apply, small),
        }
        return {
            'accuracy': accuracies,
            'widths': widths,
            'flops': graph.cost(keep).flops / graph.cost().flops,
            'loaded': accuracy_in_another_process(self.settings, path),
            'images': len(self.images),
            **self.compare(pruned, small_apply, cut),
        }

    def accuracy(self, apply_fn: Apply, params: Any) -> float:
        """The share of images that are recognised."""
        predictions = jax.jit(apply_fn)(params, self.images).argmax(-1)
        return float(np.mean(np.asarray(predictions) == self.data.y_test))

    def compare(self, pruned: Any, small_apply: Apply, cut: Any) -> dict[str, Any]:
        """What the network with zeros predicts beside the smaller one, and how much faster that is."""
        run_whole = functools.partial(jax.jit(apply), pruned, self.images)
        run_small = functools.partial(jax.jit(small_apply), cut, self.images)
        logits = np.asarray(run_whole())
        small_logits = np.asarray(run_small())
        differs = logits.argmax(-1) != small_logits.argmax(-1)
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        is_near_tie = first - second < NEAR_TIE
        whole_seconds, small_seconds = median_seconds([run_whole, run_small])
        return {
            'near ties': int(is_near_tie.sum()),
            'other predictions': int((differs & ~is_near_tie).sum()),
            'speed-up': whole_seconds / small_seconds,
        }


def apply(params: Any, images: jax.Array) -> jax.Array:
    """The logits float[images, 10] of a network, whose widths are those of its parameters."""
    layers = params['params']
    widths = [layers[name]['bias'].size for name in ('Conv_0', 'Conv_1', 'Dense_0')]
    logits = Network(tuple(widths)).apply(params, images)
    assert isinstance(logits, jax.Array)
    return logits


def median_seconds(calls: Sequence[Callable[[], Any]], rounds: int = 15) -> list[float]:
    """How long each of some calls takes; they take turns, so that a slow moment meets all of them."""
    times = []
    for _ in range(rounds):
        times_of_round = []
        for call in calls:
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times_of_round.append(time.perf_counter() - begin)
        times.append(times_of_round)
    return np.median(times, axis=0).tolist()


def accuracy_in_another_process(settings: Settings, path: Path) -> float:
    """Loads a small model with `--load` in a fresh process; returns the accuracy that it prints."""
    command = [sys.executable, __file__, '--load', str(path)]
    if settings.data_dir is not None:
        command += ['--data-dir', str(settings.data_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def report(results: Sequence[dict[str, Any]]) -> str:
    """A table of accuracies with intervals of 95 %, and what was measured of each small model."""
    lines = ['| | accuracy (%) |', '|---|--:|']
    for key, name in ROWS.items():
        values = [100 * result['accuracy'][key] for result in results]
        lines.append(f'| {name} | {_with_interval(values)} |')
    differences = []
    for result in results:
        differences.append(100 * (result['accuracy']['pruned'] - result['accuracy']['dense']))
    lines += [f'| channels removed, beside dense | {_with_interval(differences)} |', '']
    for result in results:
        lines.append(
            f'widths {result["widths"]}: {result["flops"]:.3f} of the FLOPs, {result["speed-up"]:.1f} times as fast; '
            f'{result["other predictions"]} of {result["images"]} predictions differ besides '
            f'{result["near ties"]} near ties; accuracy {100 * result["loaded"]:.2f} % when loaded again'
        )
    return '\n'.join(lines)


def _with_interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f'{values[0]:.2f}'
    quantile = STUDENT.get(len(values) - 1, 1.96)
    standard_error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f'{np.mean(values):.2f} ± {quantile * standard_error:.2f}'


def run(settings: Settings) -> None:
    """Trains what has no result yet, and prints the table."""
    data = load_dataset(settings.data_dir)
    experiment = Experiment(settings, data)
    if settings.load is not None:
        small = jaxpruner.load_small_model(experiment.graph, settings.load)
        print(experiment.accuracy(experiment.graph.small_apply(small.keep), small.params))
        return
    settings.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in settings.seeds:
        name = f'{data.name}_{settings.steps}_{seed}'
        path = settings.out / f'{name}.json'
        if not path.exists():
            text = json.dumps(experiment.run(seed, settings.out / f'{name}.safetensors'))
            atomic_files.replace_file(path, lambda temporary, text=text: temporary.write_text(text))
        results.append(json.loads(path.read_text()))
    print(report(results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example with the arguments of a command line; returns the exit status."""
    try:
        settings = tyro.cli(Settings, description=__doc__, args=arguments)
        settings.check()
        run(settings)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f'shrink_cnn.py: {error}', file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print('Interrupted. The same command goes on.')
        return INTERRUPTED
    return 0


if __name__ == '__main__':
    sys.exit(main())
