"""What `jaxpruner pack` and `jaxpruner inspect` show of formats without zeros."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxpruner import text_tables
from jaxpruner.checkpoints import LeafReport
from jaxpruner.cli import output
from jaxpruner.cli.checkpoint_tables import size_words
from jaxpruner.text_tables import Column

if TYPE_CHECKING:
    from jaxpruner.sparse.storage.packed_file import PackedFile

HEADINGS = {
    'dense': 'dense',
    'n_by_m': 'N:M',
    'blocks': 'blocks',
    'csr': 'CSR',
    'bitmask': 'a bit each',
}
_PACKED_COLUMNS = (
    Column('format'),
    Column('leaves', align='right'),
    Column('weights', align='right'),
    Column('dense', align='right'),
    Column('packed', align='right'),
    Column('first of them', overflow='fold'),
)
_SIZE_COLUMNS = (
    Column('leaf', overflow='fold'),
    *[Column(heading, align='right') for heading in HEADINGS.values()],
    Column('smallest'),
)
_NOTHING = '–'


def packing_words(packed: 'PackedFile') -> str:
    """Says what all leaves take, dense and packed."""
    dense = sum(leaf.bytes for leaf in packed.leaves.values())
    stored = sum(packed.stored_bytes.values())
    return (
        f'{len(packed.leaves)} leaves, {size_words(dense)} dense, {size_words(stored)} packed '
        f'({stored / max(dense, 1):.2%})'
    )


def packed_table(packed: 'PackedFile') -> str:
    """Lays out a row for each format that leaves have."""
    rows = []
    for format_name, heading in HEADINGS.items():
        names = [name for name, other in packed.formats.items() if other == format_name]
        if not names:
            continue
        weights = sum(packed.leaves[name].size for name in names)
        dense = sum(packed.leaves[name].bytes for name in names)
        stored = sum(packed.stored_bytes[name] for name in names)
        counts = [str(len(names)), f'{weights:,}', size_words(dense), size_words(stored)]
        rows.append([heading, *counts, output.printable(names[0])])
    return text_tables.to_text(_PACKED_COLUMNS, rows, width=output.width())


def sizes_table(
    reports: Sequence[LeafReport],
    sizes: Sequence[Mapping[str, int | None]],
    smallest: Sequence[str],
) -> str:
    """Lays out what each leaf takes in each format, or equal layers together, the smallest format in words."""
    names = [output.printable(report.name) for report in reports]
    alike = []
    for report, leaf_sizes, best in zip(reports, sizes, smallest, strict=True):
        possible = [name for name in HEADINGS if leaf_sizes[name] is not None]
        alike.append((report.leaf, best, *possible))
    rows = []
    for name, indices in text_tables.group_layers(names, alike):
        _, best, *possible = alike[indices[0]]
        cells = []
        for format_name in HEADINGS:
            count = sum(sizes[i][format_name] or 0 for i in indices)
            cells.append(size_words(count) if format_name in possible else _NOTHING)
        rows.append([name, *cells, HEADINGS[best]])
    return text_tables.to_text(_SIZE_COLUMNS, rows, width=output.width())
