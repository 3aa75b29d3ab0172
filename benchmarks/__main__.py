"""Measures what the library claims: `python -m benchmarks SUBJECT …`; ratios are medians with their quartiles."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import jax
import tyro
from rich.console import Console

from benchmarks import report
from benchmarks.against import PACKAGE, compare
from benchmarks.elsewhere import command_elsewhere
from benchmarks.timing import IN_PLACE

Subject = Literal[
    'activations',
    'selection',
    'nm',
    'block',
    'packing',
    'global',
    'step',
    'memory',
    'sharded',
    'compile',
    'oneshot',
    'structure',
    'sparse_execution',
    'sparse_training',
    'sparse_unstructured',
    'storage',
]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
# Each subject is a file of its name; a word of the language cannot name one.
_OTHER_NAMES = {'global': 'whole_model'}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Runs benchmarks on the machine as it is: nothing else should run meanwhile."""

    subjects: Annotated[tuple[Subject, ...], tyro.conf.Positional] = SUBJECTS
    """What to measure; each is a file here."""
    size: Literal['small', 'cpu', 'gpu', 'auto'] = 'auto'
    """Which sizes: those for the device at hand unless named; small ones show that a benchmark runs, and no more."""
    rounds: int | None = None
    """How often each function is timed; none: as often as the subject needs."""
    json: bool = False
    """Print JSON instead of tables, a line for each subject."""
    against: Path | None = None
    """Another checkout of this library: print how many times as much each number is here as with its source."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subjects with the arguments of a command line; returns the exit status."""
    if IN_PLACE in os.environ:
        jax.config.update('jax_cpu_enable_async_dispatch', False)
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    if settings.rounds is not None and settings.rounds < 2:
        print(f'benchmarks: --rounds must be at least 2, got {settings.rounds}', file=sys.stderr)
        return 2
    if settings.against is not None and not (settings.against / PACKAGE).is_dir():
        print(f'benchmarks: no {PACKAGE} in --against {settings.against}', file=sys.stderr)
        return 2
    size = (
        ('cpu' if jax.default_backend() == 'cpu' else 'gpu')
        if settings.size == 'auto'
        else settings.size
    )
    for name in settings.subjects:
        subject = importlib.import_module(f'benchmarks.{_OTHER_NAMES.get(name, name)}')
        rounds = settings.rounds or subject.ROUNDS
        missing = subject.environment() if hasattr(subject, 'environment') else {}
        if settings.against is not None:
            rows = compare(name, subject.COLUMNS, size, rounds, settings.against)
            title = f'{name}, times that of {settings.against}'
            report.show(title, subject.COLUMNS, rows, settings.json)
        elif missing:
            command = command_elsewhere(name, size, rounds, settings.json)
            with subprocess.Popen(command, env={**os.environ, **missing}) as process:
                try:
                    status = process.wait()
                except KeyboardInterrupt:
                    process.wait()  # it was stopped, too, and prints what it has
                    raise
                except SystemExit:  # SIGTERM stopped this process alone
                    process.terminate()
                    raise
            if status:
                return status
        else:
            rows: list[report.Row] = []
            try:
                for row in _watched(subject.run(size, rounds), name):
                    rows.append(row)
            finally:  # neither Ctrl-C nor SIGTERM loses a row that is measured
                report.show(name, subject.COLUMNS, rows, settings.json)
    return 0


def _watched(rows: Iterable[report.Row], subject: str) -> Iterator[report.Row]:
    """Shows which row was measured last, where somebody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from rows
        return
    with console.status(subject) as status:
        for row in rows:
            status.update(f'{subject}: {row.name} is done')
            yield row


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as a shell reports it
    sys.exit(main())
