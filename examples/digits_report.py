"""The results of the digits demo: what is kept of each algorithm, the file they are written to, and the table."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

RESULTS_NAME = 'results.json'
EARLIER_NAME = 'results.earlier.json'


@dataclasses.dataclass(frozen=True)
class Result:
    """One algorithm, trained with every seed."""

    name: str
    family: str  # what kind of algorithm it is, for the colours of the plot
    asked: str  # the sparsity asked for, as text: "90%", "2:4"
    accuracies: list[float]  # on the test images, in [0, 1], one per seed
    sparsities: list[float]  # reached over all kernels, in [0, 1], one per seed
    relative_time: float  # time per step over that of dense
    first_layer_mask: list  # 0 or 1 per weight of the first seed, [3, 3, 1, filters]
    seconds: float  # wall-clock time, compilation included

    @property
    def label(self) -> str:
        """What the table and the plots call it."""
        return 'dense' if self.family == 'dense' else self.name

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float:
        """The standard deviation over the seeds (of a sample), 0 for one seed."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0


class ResultsFile:
    """`results.json` in a folder, rewritten after every algorithm, so that an interruption loses none that finished."""

    def __init__(self, folder: Path, settings: dict[str, Any], fresh: bool = False):
        """Opens the file; one that an interrupted run with the same settings left is continued, unless `fresh`.

        Any other earlier file is kept beside it under the name `results.earlier.json`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RESULTS_NAME
        self.settings = settings
        self.results: list[Result] = []
        if self.path.exists():
            earlier = None if fresh else _unfinished_results(self.path, settings)
            if earlier is None:
                os.replace(self.path, folder / EARLIER_NAME)
            self.results = earlier or []

    def add(self, result: Result) -> None:
        """Appends a finished algorithm and writes the file."""
        self.results.append(result)
        self.write(finished=False)

    def write(self, finished: bool) -> None:
        """Writes beside the file and renames, so that a reader never meets half of it."""
        content = {
            'finished': finished,
            'settings': self.settings,
            'results': [dataclasses.asdict(result) for result in self.results],
        }
        beside = self.path.with_suffix('.json.new')
        beside.write_text(json.dumps(content, indent=1) + '\n')
        os.replace(beside, self.path)

    def get(self, name: str) -> Result | None:
        """Returns the result of an algorithm if it has finished."""
        return next((result for result in self.results if result.name == name), None)


def make_table(results: Sequence[Result]) -> Table:
    """Returns the table of accuracy, sparsity and time, in the order of the results."""
    table = Table()
    table.add_column('algorithm', no_wrap=True)
    for heading in ('accuracy %', 'asked', 'reached', 'time/step'):
        table.add_column(heading, justify='right', no_wrap=True)
    for result in results:
        table.add_row(
            result.label,
            f'{100 * result.mean:.2f} ± {100 * result.deviation:.2f}',
            result.asked,
            f'{100 * np.mean(result.sparsities):.1f}%',
            f'{result.relative_time:.2f}x',
        )
    return table


def _unfinished_results(path: Path, settings: dict[str, Any]) -> list[Result] | None:
    """Returns what an interrupted run with these settings left, or None where the file is anything else."""
    try:
        content = json.loads(path.read_text())
        if content['finished'] or content['settings'] != settings:
            return None
        return [Result(**fields) for fields in content['results']]
    except (OSError, ValueError, TypeError, KeyError):  # no file of ours, or one of another version
        return None
