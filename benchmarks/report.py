"""Prints what was measured, as a table or as JSON, with the machine that it was measured on."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import optax
from rich.console import Console
from rich.table import Table

import jaxpruner
from benchmarks.timing import Ratio

Value = Ratio | float | int | str | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: a value for each column, `None` where there is nothing to say."""

    name: str
    values: tuple[Value, ...]


def machine() -> str:
    """The device, its number, the processor's cores, and the versions."""
    devices = jax.devices()
    return (
        f'{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores, Python {platform.python_version()}, '
        f'jax {jax.__version__}, optax {optax.__version__}'
    )


def show(subject: str, columns: Sequence[str], rows: Sequence[Row], as_json: bool) -> None:
    """Prints a subject's table, as JSON on one line."""
    if as_json:
        table = []
        for row in rows:
            values = map(_as_json, row.values)
            table.append({'name': row.name, **dict(zip(columns, values, strict=True))})
        library = str(Path(jaxpruner.__file__).parent)
        printed = {'subject': subject, 'machine': machine(), 'library': library, 'rows': table}
        print(json.dumps(printed), flush=True)
        return
    table = Table('', *columns, title=f'{subject}: {machine()}')
    for row in rows:
        table.add_row(row.name, *map(as_text, row.values))
    Console(highlight=False, width=None if os.isatty(1) else 160).print(table)


def as_text(value: Value) -> str:
    """A value as a table shows it: numbers with three or four digits, a ratio with its spread."""
    if value is None:
        return ''
    if isinstance(value, Ratio):
        digits = _decimals(value.median)
        return f'{value.median:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})'
    if isinstance(value, float):
        return f'{value:.{_decimals(value)}f}'
    return str(value)


def _decimals(number: float) -> int:
    # Around 1, steps differ from dense ones by thousandths.
    for limit, decimals in ((2, 3), (10, 2), (100, 1)):
        if abs(number) < limit:
            return decimals
    return 0


def _as_json(value: Value) -> Value | dict[str, float]:
    return value._asdict() if isinstance(value, Ratio) else value
