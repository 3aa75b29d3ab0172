"""`jaxpruner demo`: a comparison that takes two minutes, with words about what it does and what came out."""

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path

from jaxpruner import text_tables
from jaxpruner.cli import arguments
from jaxpruner.cli.options import TrainingOptions
from jaxpruner.report import differences, experiments, results

# What is trained, and how it prunes.
ALGORITHMS = {
    experiments.DENSE: 'nothing',
    'random': 'any weights',
    'magnitude': 'the smallest of each layer',
    'global_magnitude': 'the smallest of all layers',
    'magnitude_ste': 'the smallest, in the forward pass alone',
    'set': 'sparse from the start, grows weights at random',
    'rigl': 'sparse from the start, grows weights by gradients',
}
SPARSITIES = (0.8, 0.95)
SEEDS = (0, 1, 2)
TEST_IMAGES = 450
_BEST, _MAY_BE_AS_GOOD = '*', '~'


@dataclasses.dataclass(frozen=True)
class Demo:
    """Train a small network dense and pruned by six algorithms, and explain what came out.

    It takes about a minute and a half on two cores. Ctrl-C keeps what is done, and the same command goes on there.

    Examples:
      jaxpruner demo --out results
    """

    out: Path = Path('out/demo')
    """Folder for the results."""
    set: arguments.Settings = ()
    """Single values of the recipe, such as steps=20, with which nothing is learned."""
    progress: bool = True
    """Show a progress bar, or without a terminal a line now and then."""

    def run(self) -> int:
        """Says what comes, trains, explains the table; returns the exit status."""
        print(self._announcement(), flush=True)  # before JAX is loaded
        from jaxpruner.cli import training

        options = TrainingOptions('digits-lenet', out=self.out, set=self.set, plots=True)
        options = dataclasses.replace(options, progress=self.progress)
        cells = training.plan(tuple(ALGORITHMS), SPARSITIES, SEEDS)
        outcome = training.train(options, cells, prints_lines=True)
        if outcome.is_complete:
            print(f'\n{result_table(outcome.cells)}\n\n{explanation()}\n')
            sparsity, layers = training.draw(outcome.cells, outcome.out)
            print(f'Open next:\n  {sparsity}: accuracy against sparsity')
            print(f'  {layers}: how sparse each layer became')
            print('  `jaxpruner compare digits-resnet --plots` does this with another network.')
        return training.exit_status(outcome)

    def _announcement(self) -> str:
        pruned = len(ALGORITHMS) - 1
        networks = len(SEEDS) * (1 + pruned * len(SPARSITIES))
        shares = ' and '.join(f'{sparsity:.0%}' for sparsity in SPARSITIES)
        return textwrap.fill(
            f'Trains LeNet-300-100 on handwritten digits: dense, and with {shares} of its weights '
            f'pruned by {pruned} algorithms. {networks} networks take about a minute and a half on '
            f'two cores. Results go to {self.out}; what is there is not trained again.',
            text_tables.WIDTH,
        )


def result_table(cells: Sequence[results.Cell]) -> str:
    """Makes a table of at most 80 columns: accuracies in per cent, the best marked, and those that may be as good."""
    (experiment,) = experiments.group_cells(cells)
    columns = [text_tables.Column('algorithm'), text_tables.Column('prunes', overflow='wrap')]
    marked = []
    for sparsity in SPARSITIES:
        columns.append(text_tables.Column(f'{sparsity:.0%} pruned'))
        marked.append(_marked_column(experiment, sparsity))
    rows = []
    for name, words in ALGORITHMS.items():
        shown_name = 'dense' if name == experiments.DENSE else name
        rows.append([shown_name, words, *(texts[name] for texts in marked)])
    return text_tables.to_text(columns, rows)


def _marked_column(experiment: experiments.Experiment, sparsity: float) -> dict[str, str]:
    """Writes the accuracy of each algorithm with its mark."""
    texts = {}
    means = {}
    for name in ALGORITHMS:
        mean, deviation, _ = experiment.summarize(name, sparsity) or (float('nan'), None, 0)
        texts[name] = f'{100 * mean:.2f} ± {100 * (deviation or 0):.2f}'
        if name != experiments.DENSE:
            means[name] = mean
    best = max(means, key=means.__getitem__)
    for name in means:
        behind = differences.paired_difference(experiment, best, name, sparsity)
        is_best = texts[name].split()[0] == texts[best].split()[0]
        if is_best:
            texts[name] += f' {_BEST}'
        elif not behind.is_certain:
            texts[name] += f' {_MAY_BE_AS_GOOD}'
    return texts


def explanation() -> str:
    """Says what the numbers and marks mean."""
    return textwrap.fill(
        f'Accuracy in % on {TEST_IMAGES} test images, of which one is {100 / TEST_IMAGES:.2f}: mean '
        f'± standard deviation of {len(SEEDS)} seeds. {_BEST} is the best of its column. '
        f'{_MAY_BE_AS_GOOD} may be as good: the 95 % interval of its difference to the best, seed by '
        'seed, includes zero, so that noise may explain it. More seeds would tell more apart.',
        text_tables.WIDTH,
    )
