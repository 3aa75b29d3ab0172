"""What the one-shot example prunes a trained model with, and what it keeps of each pruned model."""

import functools
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner import oneshot, uses
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.core import atomic_files
from jaxpruner.report import results
from oneshot_shakespeare_training import Text, Trained, Training, draw, windows

ALGORITHMS = ('magnitude', 'ria', 'sparsegpt', 'wanda')
DENSE = 'no_prune'
OUTPUT_ERROR = 'error of layer outputs'
PRUNED = 'block_*/kernel'


class Variant(NamedTuple):
    """A way to prune, whose results have a folder of their own."""

    folder: str
    title: str
    sparsity_type: Any
    sparsities: tuple[float, ...]
    owl_per: str | None = (
        None  # what has one sparsity with OWL, a 'block' or a 'leaf'; `None` is without OWL
    )
    sequential: bool = False

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Magnitude takes no statistics that could be taken block by block."""
        return tuple(name for name in ALGORITHMS if not (self.sequential and name == 'magnitude'))

    @property
    def is_n_by_m(self) -> bool:
        """Whether the type alone says the sparsity."""
        return isinstance(self.sparsity_type, jaxpruner.NByM)


def variants(recipe: Recipe) -> tuple[Variant, ...]:
    """The ways of a recipe: unstructured without OWL and with it, and N:M; with statistics taken at once or in turn."""
    task: Any = recipe.task
    n, m = map(int, task['n_by_m'].split(':'))
    unstructured = 'unstructured', task['sparsities']
    n_by_m = jaxpruner.NByM(n, m, axis='input'), (1 - n / m,)
    return (
        Variant('unstructured', 'unstructured', *unstructured),
        Variant('owl', 'unstructured with OWL', *unstructured, owl_per='block'),
        Variant('owl_leaf', 'unstructured with OWL per leaf', *unstructured, owl_per='leaf'),
        Variant('n_by_m', f'{n}:{m}', *n_by_m),
        Variant('sequential', 'unstructured, block by block', *unstructured, sequential=True),
        Variant('sequential_n_by_m', f'{n}:{m}, block by block', *n_by_m, sequential=True),
    )


def results_of(recipe: Recipe) -> list[tuple[Variant, str, float]]:
    """What is to be had of each model: variant, algorithm, sparsity; the dense model stands in each variant."""
    return [
        (variant, algorithm, sparsity)
        for variant in variants(recipe)
        for algorithm, sparsity in (
            (DENSE, 0.0),
            *itertools.product(variant.algorithms, variant.sparsities),
        )
    ]


def prune_all(training: Training, text: Text, trained: Trained, out: Path) -> None:
    """Prunes a model in every way that has no result yet; writes results and the losses of validation sequences.

    Args:
      training: of the model.
      text: calibration takes sequences of its training part.
      trained: the model.
      out: the folder of all results.
    """
    recipe, seed = training.recipe, trained.seed
    validation = windows(text.validation, training.context)
    finished = {
        variant.folder: {cell.name for cell in read_cells(out / variant.folder)}
        for variant in variants(recipe)
    }
    pruning: Pruning | None = None
    for variant, algorithm, sparsity in results_of(recipe):
        folder = out / variant.folder
        if f'{algorithm}_{sparsity}_{seed}' in finished[variant.folder]:
            continue
        pruning = pruning or Pruning(training, text, trained.params)
        began = time.perf_counter()
        pruned, layers, reached = pruning.prune(variant, algorithm, sparsity)
        seconds = trained.seconds if algorithm == DENSE else time.perf_counter() - began
        losses = np.asarray(training.evaluate(pruned, validation))
        cell = results.Cell(
            workload=variant.title, data=recipe.data, algorithm=algorithm, sparsity=sparsity, seed=seed,
            metric='loss', better='low', value=float(losses.mean(dtype=np.float64)),
            metrics={OUTPUT_ERROR: pruning.output_error(pruned)}, reached=reached, layers=layers,
            steps=recipe.steps, seconds=seconds, recipe=recipe.digest(),
        )  # fmt: skip
        write_losses(folder, cell, losses)
        results.write_cell(folder, cell)
        print(
            f'seed {seed}, {variant.title}: {algorithm} {100 * sparsity:.4g} %: loss {cell.value:.4f}',
            flush=True,
        )


class Pruning:
    """Prunes one model; what the algorithms know of its inputs is taken once."""

    def __init__(self, training: Training, text: Text, params: Any):
        recipe = training.recipe
        task: Any = recipe.task
        key = jax.random.key(task['calibration_seed'])
        tokens = draw(
            jnp.asarray(text.train), key, task['calibration_sequences'], training.context
        )[:, :-1]
        batches = [
            tokens[at : at + recipe.batch_size] for at in range(0, len(tokens), recipe.batch_size)
        ]
        self.apply, self.params, self.batches = training.apply, params, batches
        self.blocks = [f'block_{layer}/*' for layer in range(recipe.model['layers'])]
        self.graph = jaxpruner.param_uses(training.apply, params, batches[0])
        self.calibration = oneshot.calibrate(
            training.apply, params, batches, kind='gram', only=PRUNED
        )

    def prune(
        self, variant: Variant, algorithm: str, sparsity: float
    ) -> tuple[Any, dict[str, float], float]:
        """The pruned parameters, the sparsity of each layer that may be pruned, and that of all of them."""
        if algorithm == DENSE:
            return self.params, {}, 0.0
        layer_sparsities = None
        if (
            algorithm == 'magnitude' and variant.owl_per
        ):  # which looks at no inputs: it gets the sparsities of the others
            layer_sparsities = self.prune(variant, 'wanda', sparsity)[1]
        pruner = jaxpruner.create_updater_from_config(
            {
                'algorithm': algorithm,
                'sparsity': sparsity,
                'sparsity_type': uses.with_input_axes(
                    {PRUNED: variant.sparsity_type, '*': None}, self.graph
                ),
                'custom_sparsity_map': layer_sparsities,
                'owl': variant.owl_per is not None,
                'owl_per': variant.owl_per,
                'sequential': variant.sequential,
                'blocks': self.blocks if variant.sequential else None,
            }
        )
        known: dict[str, Any] = {}
        if isinstance(pruner, oneshot.CalibratedPruning):
            data = {'apply_fn': self.apply, 'batches': self.batches}
            known = data if variant.sequential else {'calibration': self.calibration}
        pruned, masks = pruner.instant_sparsify(self.params, **known)
        summary = jaxpruner.summarize_sparsity(masks)
        layers = {name: summary[name] for name in summary if not name.startswith('_')}
        return pruned, layers, summary['_total_sparsity']

    def output_error(self, pruned: Any) -> float:
        """The squared error of a layer's outputs as a share of their squares, with the inputs of the dense model.

        It is what SparseGPT minimizes, and Wanda as if inputs were uncorrelated; the mean over layers.
        """
        shares = []
        for path, entries in self.calibration.items():
            dense, new = (
                functools.reduce(lambda tree, key: tree[key], path, tree)
                for tree in (self.params, pruned)
            )
            for matrices, statistics in entries:
                weights, change = matrices.read(dense), matrices.read(dense) - matrices.read(new)
                shares.append(
                    _squares(statistics.gram, change) / _squares(statistics.gram, weights)
                )
        return float(np.mean(shares))


def _squares(gram: jax.Array, weights: jax.Array) -> float:
    return float(jnp.sum(weights * jnp.matmul(gram, weights, precision='highest')))


def write_losses(folder: Path, cell: results.Cell, losses: np.ndarray) -> None:
    """Keeps the loss of each validation sequence of a result."""
    path = folder / 'losses' / f'{cell.name}.npy'
    atomic_files.replace_file(path, lambda temporary: np.save(temporary, losses), keeps_ending=True)


def read_cells(folder: Path) -> list[results.Cell]:
    """The results in a folder, which need not be there; files that are none are named and set aside."""
    return results.read_cells(folder, set_aside=True) if any(folder.glob('cells/*.json')) else []


def read_losses(folder: Path, cell: results.Cell) -> np.ndarray:
    """The loss of each validation sequence of a result, float32[sequences]."""
    path = folder / 'losses' / f'{cell.name}.npy'
    try:
        return np.load(path)
    except (OSError, EOFError, ValueError) as error:
        remedy = f'remove cells/{cell.name}.json beside it, and prune again'
        raise ValueError(
            f'{path} does not hold the losses of a result ({error}); {remedy}'
        ) from error
