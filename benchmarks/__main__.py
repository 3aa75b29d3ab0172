"""Measures what the library claims: `python -m benchmarks SUBJECT …`; ratios are medians with their quartiles."""

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import tyro

from benchmarks import report

Subject = Literal['activations']


@dataclasses.dataclass(frozen=True)
class Settings:
    """Runs benchmarks on the machine as it is: nothing else should run meanwhile."""

    subjects: Annotated[tuple[Subject, ...], tyro.conf.Positional] = ('activations',)
    """What to measure; each is a file here."""
    size: Literal['small', 'cpu', 'gpu', 'auto'] = 'auto'
    """Which sizes: those for the device at hand unless named; small ones show that a benchmark runs, and no more."""
    rounds: int = 20
    """How often each function is timed."""
    json: bool = False
    """Print JSON instead of tables."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subjects with the arguments of a command line; returns the exit status."""
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    if settings.rounds < 2:
        print(f'benchmarks: --rounds must be at least 2, got {settings.rounds}', file=sys.stderr)
        return 2
    size = ('cpu' if jax.default_backend() == 'cpu' else 'gpu') if settings.size == 'auto' else settings.size
    for name in settings.subjects:
        subject = importlib.import_module(f'benchmarks.{name}')
        report.show(name, subject.COLUMNS, subject.run(size, settings.rounds), settings.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
