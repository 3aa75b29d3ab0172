"""What the one-shot example prunes a trained model with, and what it keeps of each pruned model."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner import oneshot, uses
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.report import figures, results
from oneshot_shakespeare_training import Text, Trained, Training, draw, windows

ALGORITHMS = ('magnitude', 'ria', 'sparsegpt', 'wanda')
DENSE = 'no_prune'
PRUNED = 'block_*/kernel'


class Variant(NamedTuple):
    """A way to prune, whose results have a folder of their own."""

    folder: str
    title: str
    sparsity_type: Any
    sparsities: tuple[float, ...]
    owl: bool = False

    @property
    def is_n_by_m(self) -> bool:
        """Whether the type alone says the sparsity."""
        return isinstance(self.sparsity_type, jaxpruner.NByM)


def variants(recipe: Recipe) -> tuple[Variant, ...]:
    """The ways of a recipe: unstructured without and with OWL, and N:M."""
    task: Any = recipe.task
    n, m = map(int, task['n_by_m'].split(':'))
    along_inputs = jaxpruner.NByM(n, m, axis='input')
    return (
        Variant('unstructured', 'unstructured', 'unstructured', task['sparsities']),
        Variant('owl', 'unstructured with OWL', 'unstructured', task['sparsities'], owl=True),
        Variant('n_by_m', f'{n}:{m}', along_inputs, (1 - n / m,)),
    )


def results_of(recipe: Recipe) -> list[tuple[Variant, str, float]]:
    """What is to be had of each model: variant, algorithm, sparsity; the dense model stands in each variant."""
    return [
        (variant, algorithm, sparsity)
        for variant in variants(recipe)
        for algorithm, sparsity in ((DENSE, 0.0), *itertools.product(ALGORITHMS, variant.sparsities))
    ]


def prune_all(training: Training, text: Text, trained: Trained, out: Path, on_result: Callable[[int], None]) -> None:
    """Prunes a model in every way that has no result yet, and writes results and the losses of validation sequences.

    Args:
      training: of the model.
      text: calibration takes sequences of its training part.
      trained: the model.
      out: the folder of all results.
      on_result: called after each result, with the number of results.
    """
    recipe, seed = training.recipe, trained.seed
    validation = windows(text.validation, training.context)
    finished = {
        variant.folder: {cell.name for cell in read_cells(out / variant.folder)} for variant in variants(recipe)
    }
    pruning: Pruning | None = None
    for number, (variant, algorithm, sparsity) in enumerate(results_of(recipe)):
        on_result(number)
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
            metric='loss', better='low', value=float(losses.mean(dtype=np.float64)), metrics={},
            reached=reached, layers=layers, steps=recipe.steps, seconds=seconds, recipe=recipe.digest(),
        )  # fmt: skip
        write_losses(folder, cell, losses)
        results.write_cell(folder, cell)


class Pruning:
    """Prunes one model; what the algorithms know of its inputs is taken once."""

    def __init__(self, training: Training, text: Text, params: Any):
        recipe = training.recipe
        task: Any = recipe.task
        key = jax.random.key(task['calibration_seed'])
        tokens = draw(jnp.asarray(text.train), key, task['calibration_sequences'], training.context)[:, :-1]
        batches = [tokens[at : at + recipe.batch_size] for at in range(0, len(tokens), recipe.batch_size)]
        self.params = params
        self.graph = jaxpruner.param_uses(training.apply, params, batches[0])
        self.calibration = oneshot.calibrate(training.apply, params, batches, kind='gram', only=PRUNED)

    def prune(self, variant: Variant, algorithm: str, sparsity: float) -> tuple[Any, dict[str, float], float]:
        """The pruned parameters, the sparsity of each layer that may be pruned, and that of all of them."""
        if algorithm == DENSE:
            return self.params, {}, 0.0
        layer_sparsities = None
        if algorithm == 'magnitude' and variant.owl:  # which looks at no inputs: it gets the sparsities of the others
            layer_sparsities = self.prune(variant, 'wanda', sparsity)[1]
        pruner = jaxpruner.create_updater_from_config(
            {
                'algorithm': algorithm,
                'sparsity': sparsity,
                'sparsity_type': uses.with_input_axes({PRUNED: variant.sparsity_type, '*': None}, self.graph),
                'owl': variant.owl,
                'custom_sparsity_map': layer_sparsities,
            }
        )
        known = {'calibration': self.calibration} if isinstance(pruner, oneshot.CalibratedPruning) else {}
        pruned, masks = pruner.instant_sparsify(self.params, **known)
        summary = jaxpruner.summarize_sparsity(masks)
        layers = {name: summary[name] for name in summary if not name.startswith('_')}
        return pruned, layers, summary['_total_sparsity']


def write_losses(folder: Path, cell: results.Cell, losses: np.ndarray) -> None:
    """Keeps the loss of each validation sequence of a result."""
    path = folder / 'losses' / f'{cell.name}.npy'
    figures.replace_whole(path, lambda beside: np.save(beside, losses))


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
        raise ValueError(f'{path} does not hold the losses of a result ({error}); {remedy}') from error
