"""What `jaxpruner inspect` and `jaxpruner prune` show: a progress bar over tensors, and tables of them."""

import contextlib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxpruner import text_tables
from jaxpruner.checkpoints import Choice, Leaf, LeafReport
from jaxpruner.checkpoints.inspection import totals
from jaxpruner.checkpoints.plan import LOOKS_LIKE_EMBEDDING, LOOKS_LIKE_HEAD
from jaxpruner.cli import output
from jaxpruner.plan import type_words
from jaxpruner.progress import progress_bar
from jaxpruner.sparsity_types import NByM, SparsityType
from jaxpruner.text_tables import Column

_REPORT_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('shape'),
    Column('dtype'),
    Column('sparsity', align='right'),
    Column('dense', align='right'),
    Column('packed', align='right'),
)
_STRUCTURE_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('structure of its zeros', overflow='wrap'),
)
_GROUP_COLUMNS = (
    Column('group', overflow='fold'),
    Column('channels', align='right'),
    Column('zero', align='right'),
    Column('which of them', overflow='wrap'),
)
_PRUNING_COLUMNS = (
    Column('tensors', align='right'),
    Column('weights', align='right'),
    Column('what happened', overflow='wrap'),
    Column('first of them', overflow='fold'),
)


@contextlib.contextmanager
def leaf_progress(
    leaves: Mapping[str, Leaf], is_shown: bool
) -> Iterator[Callable[[str, Leaf], None]]:
    """Shows on stderr which tensor is being read, and how many bytes are behind it.

    Yields a function to call with name and leaf of each tensor before it is read.
    """
    total = sum(leaf.bytes for leaf in leaves.values())
    with progress_bar(total, is_shown, in_bytes=True) as show:
        bytes_behind = 0

        def on_leaf(name: str, leaf: Leaf) -> None:
            nonlocal bytes_behind
            show(name, bytes_behind)
            bytes_behind += leaf.bytes

        yield on_leaf


def inspection_table(reports: Sequence[LeafReport]) -> str:
    """Lays out a row for each leaf or for equal layers, and below it the structures that were found."""
    names = [output.printable(report.name) for report in reports]
    rows: list[list[str]] = []
    for name, indices in text_tables.group_layers(names, [report.leaf for report in reports]):
        leaf = reports[indices[0]].leaf
        shape = '×'.join(map(str, leaf.shape)) or 'scalar'
        sparsities = [reports[i].structure.sparsity for i in indices]
        sizes = [
            size_words(sum(reports[i].leaf.bytes for i in indices)),
            size_words(sum(reports[i].packed_bytes for i in indices)),
        ]
        sparsity = text_tables.span(sparsities, '{:.2%}'.format)
        rows.append([name, shape, leaf.dtype.name, sparsity, *sizes])
    words = [_structure_words(report) for report in reports]
    structures = [
        [name, words[indices[0]]]
        for name, indices in text_tables.group_layers(names, words)
        if words[indices[0]]
    ]
    total = totals(reports)
    last_row = [
        f'{total["leaves"]} leaves',
        f'{total["weights"]:,}',
        '',
        f'{total["sparsity"]:.2%}',
        size_words(total['bytes']),
        size_words(total['packed_bytes']),
    ]
    width = output.width()
    text = text_tables.to_text(_REPORT_COLUMNS, rows, last_row, width)
    if structures:
        text += '\n\n' + text_tables.to_text(_STRUCTURE_COLUMNS, structures, width=width)
    return text


def zero_groups_table(sizes: Mapping[str, int], zeros: Mapping[str, np.ndarray]) -> str:
    """Lays out a row for each group of channels of which some are zero."""
    if not zeros:
        return f'no channels of the {len(sizes)} groups of the model are zero'
    rows = []
    for name, channels in zeros.items():
        counts = [str(sizes[name]), str(len(channels))]
        rows.append([output.printable(name), *counts, text_tables.ranges(channels.tolist())])
    return text_tables.to_text(_GROUP_COLUMNS, rows, width=output.width())


def pruning_table(
    leaves: Mapping[str, Leaf], choices: Mapping[str, Choice], reasons: Mapping[str, str]
) -> str:
    """Lays out a row for each sparsity type that tensors were pruned to, and for each reason to leave some out."""
    names_of: dict[str, list[str]] = {}
    for name in leaves:
        words = (
            f'left: {reasons[name]}' if name in reasons else _pruned_words(name, choices[name].kind)
        )
        names_of.setdefault(words, []).append(name)
    rows = []
    for words, names in names_of.items():
        weights = sum(leaves[name].size for name in names)
        rows.append([str(len(names)), f'{weights:,}', words, output.printable(names[0])])
    rows.sort(key=lambda row: row[2].startswith('left'))
    return text_tables.to_text(_PRUNING_COLUMNS, rows, width=output.width())


def tables_and_heads(reasons: Mapping[str, str], remedy: str) -> str:
    """Names what was left dense because it looks like an embedding or an output head, and how to prune it."""
    alike = (LOOKS_LIKE_EMBEDDING, LOOKS_LIKE_HEAD)
    names = [output.printable(name) for like in alike for name in reasons if reasons[name] == like]
    if not names:
        return ''
    text = f'left dense for their names: {", ".join(names)}; {remedy} prunes them, too'
    return textwrap.fill(text, output.width(), break_on_hyphens=False) + '\n'


def size_words(count: int) -> str:
    """Writes bytes in a unit of thousands, as `5.2 MB`."""
    if count < 1000:
        return f'{count} B'
    size = count / 1000
    units = iter(('kB', 'MB', 'GB', 'TB', 'PB'))
    unit = next(units)
    while size >= 1000:
        size = size / 1000
        unit = next(units)
    return f'{size:.1f} {unit}'


def _structure_words(report: LeafReport) -> str:
    structure = report.structure
    words = []
    if structure.n_of_m is not None:
        words.append(str(structure.n_of_m))
    if structure.block is not None:
        height, width = structure.block
        words.append(f'blocks {height}×{width}')
    for axis, dead in enumerate(structure.dead):
        if dead:
            indices = text_tables.ranges(report.dead_indices[axis])
            words.append(f'{dead} of {report.leaf.shape[axis]} dead along axis {axis}: {indices}')
    return ', '.join(words)


def _pruned_words(name: str, sparsity_type: SparsityType) -> str:
    words = f'pruned: {type_words(sparsity_type)}'
    is_of_flax = name.removesuffix('/value').endswith('kernel')
    if is_of_flax and isinstance(sparsity_type, NByM) and sparsity_type.axis == -1:
        pattern = f'nm_{sparsity_type.n},{sparsity_type.m},-2'
        words += f', the outputs of kernels (inputs, outputs); {pattern} lies along their inputs'
    return words
