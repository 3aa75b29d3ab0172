"""What was measured and chosen: a table to print, and a JSON file from which the choices can be used again."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpruner import text_tables
from jaxpruner.files import atomic_files
from jaxpruner.sparse.execution.executed_formats import table
from jaxpruner.sparse.execution.executed_formats.table import DENSE

_FORMAT = 'jaxpruner execution'
VERSION = 1


@dataclasses.dataclass(frozen=True)
class LayerExecution:
    """How one leaf is run.

    Attributes:
      op: `'dot'`, `'1x1 conv'` or `'conv'`.
      shape: `[*layers, inputs, outputs]` of its matrices.
      density: the share of its weights that are not zero.
      format: that was chosen.
      milliseconds: format -> time of all products with the leaf in one call; empty if nothing was measured.
      bytes: format -> the bytes of its arrays.
      not_measured: format -> why it is no candidate.
      empty_milliseconds: format -> time of a call that reads and writes alike, and multiplies next to nothing.

    >>> layer = LayerExecution('dot', (256, 256), 0.02, 'csr', {'dense': 0.4, 'csr': 0.1}, {'csr': 11000}, {})
    >>> layer.times_as_fast
    4.0
    """

    op: str
    shape: tuple[int, ...]
    density: float
    format: str
    milliseconds: Mapping[str, float]
    bytes: Mapping[str, int]
    not_measured: Mapping[str, str]
    empty_milliseconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def product_milliseconds(self, format: str) -> float:
        """The time of the products in a format, without what else a call takes."""
        return self.milliseconds[format] - self.empty_milliseconds[format]

    @property
    def times_as_fast(self) -> float:
        """How many times as fast as the dense product it is; 1 if nothing was measured."""
        if self.format not in self.milliseconds:
            return 1.0
        return self.milliseconds[DENSE] / self.milliseconds[self.format]


@dataclasses.dataclass(frozen=True)
class ExecutionReport:
    """What was measured and chosen for a model; `str` is a table.

    Attributes:
      layers: name of a leaf -> how it is run.
      dense_leaves: name -> why a leaf stays dense and was not measured.
      channels: group of channels -> how many were removed because they are zero.
      milliseconds: the time of a call of the dense model; `None` if nothing was measured.
      predicted: that of the compiled model, predicted from the times of its layers.
      measured: that of the compiled model, measured.
      pattern: a short name of the zeros.
      device: on which it was measured.
      jax: the version of JAX with which it was measured.
      notes: remarks.

    >>> report = ExecutionReport(layers={}, dense_leaves={'bias': 'no contraction reads it'}, pattern='0', device='cpu')
    >>> ExecutionReport.from_dict(report.to_dict()) == report
    True
    """

    layers: Mapping[str, LayerExecution]
    dense_leaves: Mapping[str, str]
    pattern: str
    device: str
    channels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    milliseconds: float | None = None
    predicted: float | None = None
    measured: float | None = None
    jax: str = jax.__version__
    notes: tuple[str, ...] = ()

    @property
    def times_as_fast(self) -> float | None:
        """How many times as fast as the dense model a call is; `None` if nothing was measured."""
        if self.milliseconds is None or self.measured is None:
            return None
        return self.milliseconds / self.measured

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, which appears whole or not at all.

        Args:
          path: of the file.

        Raises:
          OSError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1)
        atomic_files.replace_file(Path(path), lambda temporary: temporary.write_text(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> 'ExecutionReport':
        """Reads the file that `save` has written.

        Args:
          path: of the file.

        Raises:
          ValueError: the file is no such report, is damaged, or is of a newer version.
          OSError: it cannot be read.

        >>> import tempfile
        >>> report = ExecutionReport(layers={}, dense_leaves={}, pattern='0', device='cpu')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.save(f'{folder}/report.json')
        ...     ExecutionReport.load(f'{folder}/report.json') == report
        True
        """
        try:
            values = json.loads(Path(path).read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f'{path} is no JSON file: {error}') from error
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {'format': _FORMAT, 'version': VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> 'ExecutionReport':
        """The report of what `to_dict` returned.

        Raises:
          ValueError: it is no such report, or of a newer version.
        """
        if not isinstance(values, Mapping) or values.get('format') != _FORMAT:
            raise ValueError('this is no report of sparse.compile')
        if values.get('version') != VERSION:
            raise ValueError(
                f'the report has version {values.get("version")!r}, and this library reads version {VERSION}'
            )
        fields = {key: values[key] for key in values if key not in ('format', 'version')}
        try:
            layers = {}
            for name, layer in fields['layers'].items():
                shape = tuple(layer['shape'])
                layers[name] = LayerExecution(**{**layer, 'shape': shape})
                table.parse(layers[name].format)
            notes = tuple(fields['notes'])
            return cls(**{**fields, 'layers': layers, 'notes': notes})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'the report is damaged: {error}') from error

    def __str__(self) -> str:
        return _table(self)


_COLUMNS = (
    text_tables.Column('leaf', overflow='fold'),
    text_tables.Column('matrix', overflow='fold'),
    text_tables.Column('kept', align='right'),
    text_tables.Column('format'),
    text_tables.Column('ms', align='right'),
    text_tables.Column('dense ms', align='right'),
    text_tables.Column('others, ms', overflow='wrap'),
    text_tables.Column('bytes', align='right'),
)


def _table(report: ExecutionReport) -> str:
    layers = list(report.layers.values())
    alike = [(layer.shape, layer.format, *layer.milliseconds) for layer in layers]
    rows = []
    for name, indices in text_tables.group_layers(list(report.layers), alike):
        shape, format, *measured = alike[indices[0]]
        group = [layers[i] for i in indices]
        times = {
            other: _number(sum(layer.milliseconds[other] for layer in group)) for other in measured
        }
        others = [f'{other}: {times[other]}' for other in measured if other not in (DENSE, format)]
        is_known = all(format in layer.bytes for layer in group)
        rows.append(
            [
                name,
                '×'.join(map(str, shape)),
                text_tables.span([layer.density for layer in group], '{:.1%}'.format),
                format,
                times.get(format, ''),
                times.get(DENSE, ''),
                ', '.join(others),
                f'{sum(layer.bytes[format] for layer in group):,}' if is_known else '',
            ]
        )
    lines = [text_tables.to_text(_COLUMNS, rows)] if rows else []
    if report.channels:
        removed = ', '.join(f'{count} of {name}' for name, count in report.channels.items())
        lines.append(f'channels that are zero were removed: {removed}')
    if report.milliseconds is not None:
        lines.append(
            f'a call: dense {_number(report.milliseconds)} ms, predicted {_number(report.predicted)} ms, measured '
            f'{_number(report.measured)} ms on {report.device}'
        )
    lines += _reasons(report)
    lines += report.notes
    return '\n'.join(lines)


def _reasons(report: ExecutionReport) -> list[str]:
    """Why formats were not measured and leaves stay dense: a line for each reason, with the leaves that it is for."""
    leaves: dict[str, list[str]] = {}
    for name, layer in report.layers.items():
        for format, reason in layer.not_measured.items():
            leaves.setdefault(f'{format} is no candidate: {reason}', []).append(name)
    for name, reason in report.dense_leaves.items():
        leaves.setdefault(f'dense, since {reason}', []).append(name)
    lines = []
    for reason, names in leaves.items():
        more = f' and {len(names) - 1} more' if len(names) > 1 else ''
        lines.append(f'{names[0]}{more}: {reason}')
    return lines


def _number(milliseconds: float | None) -> str:
    return '' if milliseconds is None else f'{milliseconds:.3g}'
