"""`jaxpruner inspect CHECKPOINT`: what is in a checkpoint."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jaxpruner.cli import arguments, output
from jaxpruner.cli.progress import leaf_progress
from jaxpruner.core import text_tables

if TYPE_CHECKING:
    from jaxpruner.checkpoints import LeafReport


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show sparsity, structure and bytes of each tensor in a checkpoint.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder that orbax
    wrote. Structure is N:M (of each M weights along an axis at most N are not zero), blocks over the last two axes, and
    channels that are zero throughout. Packed means a mask of one bit a weight and the weights that are not zero, or all
    weights where that is less.

    Examples:
      jaxpruner inspect model.safetensors
      jaxpruner inspect checkpoints/1000 --json > report.json

    >>> import pathlib
    >>> Inspect(pathlib.Path('model.safetensors')).json
    False
    """

    checkpoint: arguments.CheckpointPath
    """File or folder."""
    json: bool = False
    """Print JSON instead of a table."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Reads the checkpoint and prints what is in it."""
        from jaxpruner import checkpoints
        from jaxpruner.checkpoints.inspection import totals

        checkpoint = checkpoints.open_checkpoint(self.checkpoint)
        with leaf_progress(checkpoint.leaves, self.progress) as on_leaf:
            reports = list(checkpoints.inspect_leaves(checkpoint, on_leaf))
        total = totals(reports)
        if self.json:
            content = {'leaves': [report.as_dict() for report in reports], 'total': total}
            content['metadata'] = dict(checkpoint.metadata)
            print(json.dumps(content, indent=2))
            return
        print(_table(reports, total))


_COLUMNS = (
    text_tables.Column('leaf', overflow='fold'),
    text_tables.Column('shape'),
    text_tables.Column('dtype'),
    text_tables.Column('sparsity', align='right'),
    text_tables.Column('dense', align='right'),
    text_tables.Column('packed', align='right'),
)
_NOTES = (
    text_tables.Column('leaf', overflow='fold'),
    text_tables.Column('structure of its zeros', overflow='wrap'),
)


def _table(reports: 'list[LeafReport]', total: dict[str, Any]) -> str:
    rows = [_row(report) for report in reports]
    last = [
        f'{total["leaves"]} leaves',
        f'{total["weights"]:,}',
        '',
        f'{total["sparsity"]:.2%}',
        _size(total['bytes']),
        _size(total['packed_bytes']),
    ]
    text = text_tables.to_text(_COLUMNS, rows, last, output.width())
    notes = [
        (output.printable(report.name), _structure(report))
        for report in reports
        if _structure(report)
    ]
    if not notes:
        return text
    return f'{text}\n\n{text_tables.to_text(_NOTES, notes, width=output.width())}'


def _row(report: 'LeafReport') -> list[str]:
    leaf = report.leaf
    return [
        output.printable(report.name),
        '×'.join(map(str, leaf.shape)) or 'scalar',
        leaf.dtype.name,
        f'{report.structure.sparsity:.2%}',
        _size(leaf.bytes),
        _size(report.packed_bytes),
    ]


def _size(count: int) -> str:
    """Bytes in a unit of thousands, as `5.2 MB`."""
    size, units = float(count), iter(('kB', 'MB', 'GB', 'TB', 'PB'))
    unit = 'B'
    while size >= 1000:
        size, unit = size / 1000, next(units)
    return f'{count} B' if unit == 'B' else f'{size:.1f} {unit}'


def _structure(report: 'LeafReport') -> str:
    found = report.structure
    words = [] if found.n_of_m is None else [str(found.n_of_m)]
    if found.block:
        words.append('blocks {}×{}'.format(*found.block))
    lengths = zip(found.dead, report.leaf.shape, strict=False)
    words += [
        f'{dead} of {length} dead along axis {axis}'
        for axis, (dead, length) in enumerate(lengths)
        if dead
    ]
    return ', '.join(words)
