"""`jaxpruner inspect CHECKPOINT`: what is in a checkpoint."""

import dataclasses
import json
from typing import TYPE_CHECKING

from rich import filesize
from rich.markup import escape
from rich.table import Table

from jaxpruner.cli import arguments, output
from jaxpruner.cli.progress import leaf_progress

if TYPE_CHECKING:
    from jaxpruner.checkpoints import LeafReport


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show sparsity, structure and bytes of each tensor in a checkpoint.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder that orbax
    wrote. Structure is N:M (of each M weights along an axis at most N are not zero), blocks over the last two axes, and
    channels that are zero throughout. Packed means a mask of one bit a weight and the weights that are not zero.

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
        table = Table()
        table.add_column('leaf', overflow='fold')
        for name in ('shape', 'dtype', 'sparsity', 'structure', 'dense', 'packed'):
            right = name in ('sparsity', 'dense', 'packed')
            table.add_column(name, justify='right' if right else 'left', overflow='fold')
        for report in reports:
            table.add_row(*_row(report))
        table.add_section()
        sizes = [filesize.decimal(total[key]) for key in ('bytes', 'packed_bytes')]
        table.add_row(f'{total["leaves"]} leaves', f'{total["weights"]:,}', '', f'{total["sparsity"]:.2%}', '', *sizes)
        output.console().print(table)


def _row(report: 'LeafReport') -> list[str]:
    leaf = report.leaf
    return [
        escape(report.name),
        '×'.join(map(str, leaf.shape)) or 'scalar',
        leaf.dtype.name,
        f'{report.structure.sparsity:.2%}',
        _structure(report),
        filesize.decimal(leaf.bytes),
        filesize.decimal(report.packed_bytes),
    ]


def _structure(report: 'LeafReport') -> str:
    found = report.structure
    words = [] if found.n_of_m is None else [str(found.n_of_m)]
    if found.block:
        words.append('blocks {}×{}'.format(*found.block))
    lengths = zip(found.dead, report.leaf.shape, strict=False)
    words += [f'{dead} of {length} dead along axis {axis}' for axis, (dead, length) in enumerate(lengths) if dead]
    return ', '.join(words)
