"""What was measured and chosen: a table to print."""

import dataclasses
from collections.abc import Mapping

import jax

from jaxpruner import text_tables
from jaxpruner.sparse.execution.formats import DENSE

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
      measured: that of the compiled model.
      pattern: a short name of the zeros.
      device: on which it was measured.
      jax: the version of JAX with which it was measured.
      notes: remarks.

    >>> report = ExecutionReport(layers={}, dense_leaves={'bias': 'no contraction reads it'}, pattern='0', device='cpu')
    >>> print(report)
    bias: dense, since no contraction reads it
    """

    layers: Mapping[str, LayerExecution]
    dense_leaves: Mapping[str, str]
    pattern: str
    device: str
    channels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    milliseconds: float | None = None
    measured: float | None = None
    jax: str = jax.__version__
    notes: tuple[str, ...] = ()

    @property
    def times_as_fast(self) -> float | None:
        """How many times as fast as the dense model a call is; `None` if nothing was measured."""
        if self.milliseconds is None or self.measured is None:
            return None
        return self.milliseconds / self.measured

    def __str__(self) -> str:
        layers = list(self.layers.values())
        alike = [(layer.shape, layer.format, *layer.milliseconds) for layer in layers]
        rows = []
        for name, indices in text_tables.group_layers(list(self.layers), alike):
            shape, format, *measured = alike[indices[0]]
            group = [layers[i] for i in indices]
            times = {}
            for each in measured:
                times[each] = _number(sum(layer.milliseconds[each] for layer in group))
            others = [f'{each}: {times[each]}' for each in measured if each not in (DENSE, format)]
            densities = [layer.density for layer in group]
            rows.append(
                [
                    name,
                    '×'.join(map(str, shape)),
                    text_tables.span(densities, '{:.1%}'.format),
                    format,
                    times.get(format, ''),
                    times.get(DENSE, ''),
                    ', '.join(others),
                    f'{sum(layer.bytes[format] for layer in group):,}',
                ]
            )
        lines = [text_tables.to_text(_COLUMNS, rows)] if rows else []
        if self.channels:
            removed = ', '.join(f'{count} of {name}' for name, count in self.channels.items())
            lines.append(f'channels that are zero were removed: {removed}')
        if self.milliseconds is not None and self.measured is not None:
            lines.append(
                f'a call: dense {_number(self.milliseconds)} ms, measured {_number(self.measured)} ms on {self.device}'
            )
        # A line for each reason why formats were not measured and leaves stay dense, with the leaves that it is for.
        leaves: dict[str, list[str]] = {}
        for name, layer in self.layers.items():
            for format, reason in layer.not_measured.items():
                leaves.setdefault(f'{format} is no candidate: {reason}', []).append(name)
        for name, reason in self.dense_leaves.items():
            leaves.setdefault(f'dense, since {reason}', []).append(name)
        for reason, names in leaves.items():
            more = f' and {len(names) - 1} more' if len(names) > 1 else ''
            lines.append(f'{names[0]}{more}: {reason}')
        return '\n'.join([*lines, *self.notes])


def _number(milliseconds: float) -> str:
    return f'{milliseconds:.3g}'
