"""Prints what was measured, as a table or as JSON, with the machine that it was measured on."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence

import jax
import optax
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    values: tuple[str, ...]


def machine() -> str:
    """The device, its number, the processor's cores, and the versions."""
    devices = jax.devices()
    return (
        f'{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores, Python {platform.python_version()}, '
        f'jax {jax.__version__}, optax {optax.__version__}'
    )


def show(subject: str, columns: Sequence[str], rows: Sequence[Row], as_json: bool) -> None:
    """Prints a subject's table."""
    if as_json:
        table = [{'name': row.name, **dict(zip(columns, row.values, strict=True))} for row in rows]
        print(json.dumps({'subject': subject, 'machine': machine(), 'rows': table}, indent=2))
        return
    table = Table('', *columns, title=f'{subject}: {machine()}')
    for row in rows:
        table.add_row(row.name, *row.values)
    Console(highlight=False, width=None if os.isatty(1) else 160).print(table)
