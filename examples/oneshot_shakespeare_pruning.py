"""What the one-shot example prunes a trained model with, and what it keeps of each pruned model."""

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
from jaxpruner.files import atomic_files
from jaxpruner.report import results
from oneshot_shakespeare_training import Text, Trained, Training, draw, windows

ALGORITHMS = ('magnitude', 'ria', 'sparsegpt', 'wanda')
DENSE = 'no_prune'
OUTPUT_ERROR = 'error of layer outputs'
PRUNED = 'block_*/kernel'


class Variant(NamedTuple):
    """A way to prune; its results have their own folder."""

    folder: str
    title: str
    sparsity_type: Any
    sparsities: tuple[float, ...]
    # What has one sparsity with OWL, a 'block' or a 'leaf'; `None` is without OWL.
    owl_per: str | None = None
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
    """All results of a model: variant, algorithm, sparsity; the dense model stands in each variant."""
    expected = []
    for variant in variants(recipe):
        expected.append((variant, DENSE, 0.0))
        for algorithm, sparsity in itertools.product(variant.algorithms, variant.sparsities):
            expected.append((variant, algorithm, sparsity))
    return expected


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
    """Prunes one model; the statistics of its inputs are taken once for all algorithms."""

    def __init__(self, training: Training, text: Text, params: Any):
        recipe = training.recipe
        task: Any = recipe.task
        key = jax.random.key(task['calibration_seed'])
        train_text = jnp.asarray(text.train)
        sequences = draw(train_text, key, task['calibration_sequences'], training.context)
        tokens = sequences[:, :-1]
        batches = []
        for start in range(0, len(tokens), recipe.batch_size):
            batches.append(tokens[start : start + recipe.batch_size])
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
        if algorithm == 'magnitude' and variant.owl_per:
            # Magnitude looks at no inputs, so it gets the layer sparsities of Wanda.
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
        inputs: dict[str, Any] = {}
        if isinstance(pruner, oneshot.CalibratedPruning):
            inputs = {'calibration': self.calibration}
            if variant.sequential:
                inputs = {'apply_fn': self.apply, 'batches': self.batches}
        pruned, masks = pruner.instant_sparsify(self.params, **inputs)
        summary = jaxpruner.summarize_sparsity(masks)
        layers = {name: summary[name] for name in summary if not name.startswith('_')}
        return pruned, layers, summary['_total_sparsity']

    def output_error(self, pruned: Any) -> float:
        """The squared error of a layer's outputs as a share of their squares, with the inputs of the dense model.

        SparseGPT minimizes it; Wanda does, too, if inputs are uncorrelated. The result is the mean over layers.
        """
        shares = []
        for path, entries in self.calibration.items():
            dense_leaf, pruned_leaf = _leaf_at(self.params, path), _leaf_at(pruned, path)
            for matrices, statistics in entries:
                weights = matrices.read(dense_leaf)
                change = weights - matrices.read(pruned_leaf)
                squared_error = _squares(statistics.gram, change)
                shares.append(squared_error / _squares(statistics.gram, weights))
        return float(np.mean(shares))


def _leaf_at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _squares(gram: jax.Array, weights: jax.Array) -> float:
    return float(jnp.sum(weights * jnp.matmul(gram, weights, precision='highest')))


def write_losses(folder: Path, cell: results.Cell, losses: np.ndarray) -> None:
    """Keeps the loss of each validation sequence of a result."""
    path = folder / 'losses' / f'{cell.name}.npy'
    atomic_files.replace_file(path, lambda temporary: np.save(temporary, losses))


def read_cells(folder: Path) -> list[results.Cell]:
    """The results in a folder, none if it is missing; files that are no results are named and set aside."""
    if not any(folder.glob('cells/*.json')):
        return []
    return results.read_cells(folder, set_aside=True)


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
