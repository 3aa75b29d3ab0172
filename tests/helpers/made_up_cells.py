"""Cells of runs that never took place, for tests of tables and plots."""

from jaxpruner.report import Cell

RECIPE = 'ab' * 32


def make_cell(algorithm='magnitude', sparsity=0.8, seed=0, value=0.9, **changes):
    fields = {
        'workload': 'resnet',
        'data': 'digits',
        'metric': 'accuracy',
        'better': 'high',
        'metrics': {'loss': 0.1},
        'reached': sparsity,
        'layers': {'conv/kernel': sparsity, 'head/kernel': sparsity},
        'steps': 1000,
        'seconds': 12.3,
        'recipe': RECIPE,
    }
    return Cell(
        algorithm=algorithm, sparsity=sparsity, seed=seed, value=value, **{**fields, **changes}
    )


def make_cells(values, **changes):
    """Cells from {(algorithm, sparsity): one value per seed}."""
    return [
        make_cell(algorithm, sparsity, seed, value, **changes)
        for (algorithm, sparsity), of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
