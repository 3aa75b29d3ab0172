"""What was measured and chosen: a table to print."""

import dataclasses
from collections.abc import Mapping

from jaxpruner import text_tables

_COLUMNS = (
    text_tables.Column('leaf', overflow='fold'),
    text_tables.Column('matrix', overflow='fold'),
    text_tables.Column('kept', align='right'),
    text_tables.Column('format'),
    text_tables.Column('ms', align='right'),
    text_tables.Column('others, ms', overflow='wrap'),
)


@dataclasses.dataclass(frozen=True)
class LayerExecution:
    """How one leaf is run.

    Attributes:
      shape: `[*layers, inputs, outputs]` of its matrices.
      density: the share of its weights that are not zero.
      format: that was chosen.
      milliseconds: format -> time of all products with the leaf in one call; empty if nothing was measured.
    """

    shape: tuple[int, ...]
    density: float
    format: str
    milliseconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ExecutionReport:
    """What was measured and chosen for a model; `str` is a table.

    Attributes:
      layers: name of a leaf -> how it is run.
      dense_leaves: name -> why a leaf stays dense and was not measured.
      channels: group of channels -> how many were removed because they are zero.
      milliseconds: the time of a call of the dense model; `None` if nothing was measured.
      measured: that of the compiled model.

    >>> report = ExecutionReport(layers={}, dense_leaves={'bias': 'no contraction reads it'})
    >>> print(report)
    bias: dense, since no contraction reads it
    """

    layers: Mapping[str, LayerExecution]
    dense_leaves: Mapping[str, str]
    channels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    milliseconds: float | None = None
    measured: float | None = None

    @property
    def times_as_fast(self) -> float | None:
        """How many times as fast as the dense model a call is; `None` if nothing was measured."""
        if self.milliseconds is None or self.measured is None:
            return None
        return self.milliseconds / self.measured

    def __str__(self) -> str:
        rows = []
        for name, layer in self.layers.items():
            times = {each: f'{time:.3g}' for each, time in layer.milliseconds.items()}
            own = times.pop(layer.format, '')
            others = ', '.join(f'{each}: {time}' for each, time in times.items())
            shape = '×'.join(map(str, layer.shape))
            rows.append([name, shape, f'{layer.density:.1%}', layer.format, own, others])
        lines = [text_tables.to_text(_COLUMNS, rows)] if rows else []
        if self.channels:
            removed = ', '.join(f'{count} of {name}' for name, count in self.channels.items())
            lines.append(f'channels that are zero were removed: {removed}')
        if self.milliseconds is not None:
            lines.append(f'a call: dense {self.milliseconds:.3g} ms, now {self.measured:.3g} ms')
        for name, reason in self.dense_leaves.items():
            lines.append(f'{name}: dense, since {reason}')
        return '\n'.join(lines)
