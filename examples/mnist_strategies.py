"""Trains a CNN whose weights are pruned by a strategy and whose activations are pruned in the model.

    python examples/mnist_strategies.py                       # scikit-learn's digits, half of everything, seconds
    python examples/mnist_strategies.py --strategy example-3  # 2:4 after a third of the epochs, 1:4 after two thirds
    python examples/mnist_strategies.py --strategy mine.toml --data-dir folder --epochs 5   # MNIST, minutes

A file holds a table for each epoch that prunes, such as

    [3]
    method = "unstr_local"
    prune_rate_pattern = { Dense_0-kernel = 0.9, Dense_1-kernel = 0.8 }

Prints a line for each epoch. Ctrl-C loses no more than the epoch under way: the same command goes on from there.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich.progress
import tyro
from flax.training.train_state import TrainState
from rich.console import Console

import jaxpruner
from jaxpruner import sparsity_types
from jaxpruner.activations import prune_act_unstruct
from jaxpruner.jax_pruning import (
    PruningStrategy,
    gradual_strategy,
    initial_masks,
    pruning,
    pruning_apply,
)
from mnist_strategies_data import Dataset, load_dataset
from mnist_strategies_run import Run, Snapshot
from mnist_strategies_training import CNN, evaluate, train_epoch

MOMENTUM = 0.9
TOTAL = 'total'
REFUSED = 2  # the exit status of a program that was called wrongly
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


@dataclasses.dataclass(frozen=True)
class Settings:
    """Trains a CNN with pruned weights and activations."""

    strategy: str = 'half'
    """Path of a TOML or JSON file, or one of half, dense, gradual, example-1, example-2, example-3, example-4."""
    epochs: int = 30
    """Passes over the training images."""
    batch_size: int = 64
    """Images per step."""
    learning_rate: float = 0.1
    """Of SGD with momentum 0.9."""
    activation_density: float = 0.5
    """Share of the activations of each image kept after the first convolution."""
    activation_pattern: str = '2:4'
    """N:M, kept of consecutive channels after the second convolution."""
    masks_every_step: bool = False
    """Apply masks after every step, not only after an epoch; otherwise pruned weights move in between."""
    seed: int = 0
    """Of weights and batches."""
    data_dir: Path | None = None
    """Folder with mnist.npz or MNIST's four IDX files; none: scikit-learn's digits."""
    out: Path = Path('out/mnist_strategies')
    """Folder for the state after each epoch."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""
    fresh: bool = False
    """Start again, whatever run the folder holds."""

    def check(self) -> None:
        """Refuses wrong settings before any work, with a ValueError that names the value and the remedy."""
        for name in ('epochs', 'batch_size'):
            if getattr(self, name) < 1:
                raise ValueError(
                    f'--{name.replace("_", "-")} must be at least 1, got {getattr(self, name)}'
                )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f'--learning-rate must be positive, got {self.learning_rate}')
        if not 0 <= self.seed < 2**32:
            raise ValueError(f'--seed must be in [0, 2**32), got {self.seed}')
        _named(
            '--activation-density', lambda: prune_act_unstruct(jnp.ones(4), self.activation_density)
        )
        _named('--activation-pattern', lambda: sparsity_types.parse_n_by_m(self.activation_pattern))

    def read_strategy(self) -> PruningStrategy:
        """Returns the strategy, checked against the number of epochs."""
        strategy = _named('--strategy', lambda: read_strategy(self.strategy, self.epochs))
        for epoch in strategy.epochs:
            if not 1 <= epoch <= self.epochs:
                raise ValueError(
                    f'--strategy {self.strategy} prunes at epoch {epoch}, but epochs are 1 to {self.epochs}: '
                    'change it, or --epochs'
                )
        return strategy

    def identity(self, strategy: PruningStrategy) -> dict[str, Any]:
        """Returns what two runs must share for one to continue the other."""
        free = 'out', 'progress', 'fresh'
        shared = {key: value for key, value in dataclasses.asdict(self).items() if key not in free}
        data_dir = self.data_dir and str(self.data_dir.resolve())
        return {**shared, 'strategy': repr(strategy.entries), 'data_dir': data_dir}


def built_in_strategies(epochs: int) -> dict[str, Any]:
    """Returns the strategies that have names; the document's, which prune at epochs 10 and 20, for `epochs` epochs."""
    first = max(1, epochs // 3)
    second = max(first + 1, 2 * epochs // 3)
    layers = {'Dense_0-kernel': 0.9, 'Dense_1-kernel': 0.8}
    return {
        'half': {first: {'method': 'unstr_unified_local', 'prune_rate_pattern': 0.5}},
        'dense': {},
        'gradual': gradual_strategy(range(1, first + 1), 0.1),
        'example-1': {1: {'method': 'unstr_global', 'prune_rate_pattern': 0.9}},
        'example-2': {first: {'method': 'str_unified_local', 'prune_rate_pattern': (2, 4)}},
        'example-3': {
            first: {'method': 'str_unified_local', 'prune_rate_pattern': (2, 4)},
            second: {'method': 'str_unified_local', 'prune_rate_pattern': (1, 4)},
        },
        'example-4': {first: {'method': 'unstr_unified_local', 'prune_rate_pattern': layers}},
    }


def read_strategy(name: str, epochs: int) -> PruningStrategy:
    """Returns a strategy by its name or from a file."""
    strategies = built_in_strategies(epochs)
    if name in strategies:
        return PruningStrategy.parse(strategies[name])
    if not Path(name).is_file():
        raise ValueError(f'{name!r} is no file and no name; choose from {", ".join(strategies)}')
    return PruningStrategy.parse(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example with the arguments of a command line; returns the exit status."""
    try:
        settings = tyro.cli(Settings, description=__doc__, args=arguments)
        settings.check()
        strategy = settings.read_strategy()
        dataset = load_dataset(settings.data_dir)
        if settings.batch_size > len(dataset.x_train):
            raise ValueError(
                f'--batch-size must be at most {len(dataset.x_train)}, got {settings.batch_size}'
            )
        start = create_start(settings, dataset.x_train.shape[1:])
        # Masks of ones instead of None, so that a saved state has one structure at all epochs; checks the strategy.
        start = start._replace(
            mask_key=_named('--strategy', lambda: initial_masks(start.state, strategy))
        )
        run = Run(settings.out, settings.identity(strategy), settings.fresh)
        restored = run.restore(start)
    except (ValueError, OSError) as error:
        print(f'mnist_strategies.py: {error}', file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    if restored.epoch:
        already = f'{restored.epoch} of {settings.epochs} epochs are in {run.folder} already'
        print(f'Continuing: {already} (--fresh starts again).')
    began = time.perf_counter()
    try:
        state = train(settings, strategy, dataset, run, restored).state
        _, accuracy = evaluate(state, dataset.x_test, dataset.y_test)
    except KeyboardInterrupt:
        print('Interrupted. The same command continues after the last epoch that ended.')
        return INTERRUPTED
    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    densities = kernel_densities(state)
    total = densities.pop(TOTAL)
    layers = ', '.join(f'{layer} {density:.3f}' for layer, density in densities.items())
    print(
        f'{dataset.name}, {settings.strategy}: test accuracy {100 * accuracy:.2f} %, '
        f'density {total:.3f} ({layers}), {minutes}:{seconds:02d} min.'
    )
    return 0


def train(
    settings: Settings, strategy: PruningStrategy, dataset: Dataset, run: Run, start: Snapshot
) -> Snapshot:
    """Trains, prunes, prints and saves, epoch by epoch, from a start or from what was saved."""
    done, state, mask_key, rng = start
    bar = make_progress(settings)
    steps = len(dataset.x_train) // settings.batch_size
    task = bar.add_task('training', total=settings.epochs * steps, completed=done * steps)

    for epoch in range(done + 1, settings.epochs + 1):
        bar.update(task, description=f'epoch {epoch}')
        rng, input_rng = jax.random.split(rng)
        with bar:  # not while lines are printed
            state, train_loss, train_accuracy = train_epoch(
                state,
                dataset,
                settings.batch_size,
                input_rng,
                mask_key if settings.masks_every_step else None,
                lambda: bar.advance(task),
            )
        state, mask_key = pruning_apply(state, mask_key)
        mask_updated, mask_key = pruning(state, epoch, mask_key=mask_key, prune_strategy=strategy)
        if mask_updated:
            state, mask_key = pruning_apply(state, mask_key)
        test_loss, test_accuracy = evaluate(state, dataset.x_test, dataset.y_test)
        run.save(Snapshot(epoch, state, mask_key, rng))
        print(
            f'epoch {epoch:2}: train loss {train_loss:.4f}, accuracy {100 * train_accuracy:.2f} %; '
            f'test loss {test_loss:.4f}, accuracy {100 * test_accuracy:.2f} %; '
            f'density {kernel_densities(state)[TOTAL]:.3f}{", new masks" if mask_updated else ""}',
            flush=True,
        )
    return Snapshot(settings.epochs, state, mask_key, rng)


def create_start(settings: Settings, image_shape: Sequence[int]) -> Snapshot:
    """Returns what the first epoch starts from, without masks."""
    rng, init_rng = jax.random.split(jax.random.key(settings.seed))
    model = CNN(settings.activation_density, settings.activation_pattern)
    params = model.init(init_rng, jnp.ones((1, *image_shape)))['params']
    optimizer = optax.sgd(settings.learning_rate, MOMENTUM)
    return Snapshot(
        0, TrainState.create(apply_fn=model.apply, params=params, tx=optimizer), None, rng
    )


def make_progress(settings: Settings) -> rich.progress.Progress:
    """Returns the progress bar, on the error stream so that the lines can be redirected alone."""
    shown = settings.progress and sys.stderr.isatty()
    console = Console(stderr=True, quiet=not shown)
    columns = (
        rich.progress.TextColumn('{task.description:10}'),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    return rich.progress.Progress(*columns, console=console, transient=True, disable=not shown)


def kernel_densities(state: TrainState) -> dict[str, float]:
    """Returns the share of non-zero weights in the kernel of each layer, and in all of them under `TOTAL`."""
    kernels = {layer: state.params[layer]['kernel'] for layer in state.params}
    summary = jaxpruner.summarize_sparsity(kernels)
    densities = {layer: 1 - summary[layer] for layer in kernels}
    densities[TOTAL] = 1 - summary['_total_sparsity']
    return densities


def _named(option: str, function: Callable[[], Any]) -> Any:
    """Calls a function; its errors name the option."""
    try:
        return function()
    except (ValueError, TypeError) as error:
        raise ValueError(f'{option}: {error}') from error


if __name__ == '__main__':
    sys.exit(main())
