"""`Choice`: the channels that stay, printed as a table."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxpruner import text_tables
from jaxpruner.structure.choosing.costs import Cost


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """The channels of a model that stay. Made by `ChannelGraph.choose`, and printed as a table.

    Attributes:
      keep: for `ChannelGraph.shrink`: name of a group -> indices that stay, ascending, or an array of such lists of
        shape `(*sizes of Group.lists, kept)`. Groups that stay whole have no entry.
      counts: name of a group -> how many of its channels stay, for all groups.
      scores: name of a group -> the scores of its channels, of shape `(*sizes of Group.lists, channels)`, for the
        groups that were ranked. They leave out weights that the other groups remove.
      before: parameters, FLOPs and bytes of the model.
      after: parameters, FLOPs and bytes of the smaller model.
      sizes: name of a group -> how many channels it has.
      remarks: name of a group -> why it was not ranked.
      milliseconds: of the whole model and of the smaller one, timed in turns; `None` unless the budget is a latency.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
    >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
    >>> choice = graph.choose(params, counts={'up[1]': 1})
    >>> choice.keep['up[1]'].tolist(), choice.before.parameters, choice.after.parameters
    ([3], 12, 3)
    """

    keep: Mapping[str, np.ndarray]
    counts: Mapping[str, int]
    scores: Mapping[str, np.ndarray]
    before: Cost
    after: Cost
    sizes: Mapping[str, int]
    remarks: Mapping[str, str]
    milliseconds: tuple[float, float] | None = None

    def score_share(self, name: str) -> float:
        """The share of a group's scores that its kept channels have."""
        if name not in self.keep:
            return 1.0
        table = self.scores[name]
        *owner_sizes, _ = table.shape
        lists = np.broadcast_to(self.keep[name], (*owner_sizes, self.counts[name]))
        kept = np.take_along_axis(table, lists, axis=-1)
        total = table.sum()
        return float(kept.sum() / total) if total else float('nan')

    def __repr__(self) -> str:
        return f'Choice({len(self.keep)} of {len(self.counts)} groups get smaller)'

    def __str__(self) -> str:
        return f'{self._groups_as_text()}\n\n{self._totals_as_text()}'

    def _groups_as_text(self) -> str:
        rows = []
        for name, count in self.counts.items():
            share = f'{self.score_share(name):.3f}' if name in self.scores else ''
            size = self.sizes[name]
            row = [name, str(count), str(size), share]
            if self.remarks:
                row.append(self.remarks.get(name, ''))
            rows.append(row)
        columns = _COLUMNS if self.remarks else _COLUMNS[:-1]
        return text_tables.to_text(columns, rows)

    def _totals_as_text(self) -> str:
        rows = []
        quantities = zip(_QUANTITIES, self.before, self.after, strict=True)
        for quantity, before, after in quantities:
            share = f'{after / before:.3f}' if before else ''
            rows.append((quantity, f'{before:,}', f'{after:,}', share))
        if self.milliseconds is not None:
            before, after = self.milliseconds
            share = f'{after / before:.3f}'
            rows.append(('milliseconds', f'{before:.3g}', f'{after:.3g}', share))
        return text_tables.to_text(_TOTALS, rows)


_QUANTITIES = ('parameters', 'FLOPs', 'bytes')
_COLUMNS = (
    text_tables.Column('group', overflow='fold'),
    text_tables.Column('stay', align='right'),
    text_tables.Column('of', align='right'),
    text_tables.Column('score that stays', align='right'),
    text_tables.Column('remark', overflow='wrap'),
)
_TOTALS = (
    text_tables.Column('the model'),
    text_tables.Column('before', align='right'),
    text_tables.Column('after', align='right'),
    text_tables.Column('share', align='right'),
)
