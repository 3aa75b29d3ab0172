"""`jaxpruner inspect`, `prune`, `pack` and `unpack`: checkpoints on disk, tensor by tensor."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from jaxpruner import text_tables
from jaxpruner.cli import options
from jaxpruner.plan import type_words
from jaxpruner.progress import leaf_progress
from jaxpruner.tabulation import SparsityTable, TableRow
from jaxpruner.text_tables import Column, with_prefix

if TYPE_CHECKING:
    from jaxpruner.sparse.storage.packed_files import PackedFile


def inspect(
    checkpoint: options.CheckpointPath, *, as_json: Annotated[bool, arg(name='json')] = False
) -> None:
    """Show sparsity, structure and bytes of each tensor in a checkpoint.

    Structure is N:M (of each M weights along an axis at most N are not zero) and channels that are zero
    throughout. Packed is what `jaxpruner pack` would write: each tensor in its smallest format.

    Args:
      checkpoint: a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder of orbax.
      as_json: print JSON instead of tables.
    """
    from jaxpruner.checkpoints.inspection import inspect_array
    from jaxpruner.sparse.storage import packed_files

    opened = packed_files.open_packed_or_dense(checkpoint)
    leaves, rows = [], []
    with leaf_progress(opened.leaves, True) as on_leaf:
        for name in opened.leaves:
            on_leaf(name)
            values = opened.read(name)
            report = inspect_array(name, values)
            kept = packed_files.kept_weights(name, values, None)
            smallest, plan = packed_files.planned(values, kept)
            entry = {**report._asdict(), 'sparsity': report.sparsity}
            entry['n_of_m'] = report.n_of_m and report.n_of_m._asdict()
            leaves.append({**entry, 'format': smallest, 'packed_bytes': plan.bytes})
            numbers = values.size, report.nonzeros, values.nbytes, plan.bytes
            rows.append(TableRow(name, report.shape, report.dtype, *numbers))
    table = SparsityTable(tuple(rows))
    if as_json:
        total = {
            'leaves': len(leaves),
            'weights': table.total.weights,
            'sparsity': table.total.sparsity,
            'bytes': table.total.dense_bytes,
            'packed_bytes': table.total.packed_bytes,
        }
        content = {'leaves': leaves, 'total': total, 'metadata': dict(opened.metadata)}
        print(json.dumps(content, indent=2))
        return
    width = shutil.get_terminal_size().columns
    print(table.to_text(width))
    structures = []
    for leaf in leaves:
        words = []
        if leaf['n_of_m']:
            words.append('{n}:{m} along axis {axis}'.format(**leaf['n_of_m']))
        for axis, dead in enumerate(leaf['dead_indices']):
            if dead:
                count = f'{len(dead)} of {leaf["shape"][axis]} dead along axis {axis}'
                words.append(f'{count}: {text_tables.ranges(dead)}')
        structures.append(', '.join(words))
    groups = text_tables.group_layers(list(opened.leaves), structures)
    lines = [[name, structures[i]] for name, (i, *_) in groups if structures[i]]
    if lines:
        columns = Column('leaf', overflow='fold'), Column('structure of its zeros', overflow='wrap')
        print(f'\n{text_tables.to_text(columns, lines, width=width)}')


def prune(
    checkpoint: options.CheckpointPath,
    *,
    out: Path,
    sparsity: float | None = None,
    types: options.Values = (),
    modules: options.Values = (),
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in which the weights of least magnitude are zero.

    All other scores need the model: jaxpruner.prune in Python.

    An optimizer's state stays as it is, and so does what looks like an embedding or an output head, unless a name in
    --types matches it. Names may be globs, in which `*` stands for anything.

    Args:
      checkpoint: a .safetensors file, a folder with one or with a model.safetensors.index.json (OUT is then a folder of
        shards), or a folder of orbax.
      out: what to write: a .safetensors file, or a folder for shards.
      sparsity: share of weights to remove, in [0, 1]; N:M types do without.
      types: NAME=TYPE, such as '*mlp*=2:4' '*=dense': which weights stand together; the first name that matches counts,
        TYPE alone is for the others. A type is unstructured, 2:4, nm_2,4,0 (along axis 0), block_4,4, channel_-1 or
        dense. N:M along the inputs is 2:4 for PyTorch, nm_2,4,-2 for kernels of flax and Haiku.
      modules: your own modules, imported first, such as mine for mine.py here; they may register sparsity types.
      overwrite: replace a file that is there.
    """
    from jaxpruner import checkpoints
    from jaxpruner.sparse.storage.packed_files import open_packed_or_dense

    options.import_modules(modules)
    opened = open_packed_or_dense(checkpoint)
    leaves = opened.leaves
    rules = []
    for name, _, text in (rule.rpartition('=') for rule in options.flat(types)):
        rules.append((name or None, text.strip()))
    choices = checkpoints.choose(leaves, sparsity, rules)
    kept = checkpoints.prune(opened, out, choices, overwrite)
    size = sum(leaves[name].size for name in kept)
    removed = size - sum(kept.values())
    total = sum(leaf.size for leaf in leaves.values())
    print(
        f'{out}: {len(kept)} of {len(leaves)} tensors pruned, {removed:,} of their {size:,} '
        f'weights removed ({removed / max(size, 1):.2%}; {removed / max(total, 1):.2%} of all {total:,})'
    )
    names_of: dict[str, list[str]] = {}
    for name, choice in choices.items():
        is_left = isinstance(choice, str)
        words = f'left: {choice}' if is_left else f'pruned: {type_words(choice.kind)}'
        names_of.setdefault(words, []).append(name)
    for words, names in sorted(names_of.items(), reverse=True):  # what is pruned first
        weights = sum(leaves[name].size for name in names)
        first = text_tables.printable(names[0])
        print(f'{words}: {len(names)} tensors, {weights:,} weights, first {first}')


def pack(checkpoint: options.CheckpointPath, *, out: Path, overwrite: bool = False) -> None:
    """Write a checkpoint as one safetensors file in which each tensor has its smallest format.

    `jaxpruner unpack` writes the tensors as they were, bit by bit, and jaxpruner.sparse.load reads them in Python.

    Args:
      checkpoint: a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder of orbax.
      out: the file to write.
      overwrite: replace a file that is there.
    """
    from jaxpruner import sparse
    from jaxpruner.sparse.storage.packed_files import open_packed_or_dense

    opened = open_packed_or_dense(checkpoint)
    sparse.save(out, opened, metadata=opened.metadata, overwrite=overwrite)
    print(f'{out}: {_packing_words(sparse.open_packed(out))}')


def unpack(packed: options.CheckpointPath, *, out: Path, overwrite: bool = False) -> None:
    """Write a packed file as an ordinary safetensors file, bit by bit what was packed.

    Args:
      packed: a file that `jaxpruner pack` or jaxpruner.sparse.save wrote.
      out: the .safetensors file to write.
      overwrite: replace a file that is there.
    """
    from jaxpruner import sparse
    from jaxpruner.checkpoints.writing import write_tensors

    opened = sparse.open_packed(packed)
    write_tensors(out, opened.leaves, opened.read, opened.metadata, overwrite, progress=True)
    print(f'{out}: {_packing_words(opened)}')


def _packing_words(packed: 'PackedFile') -> str:
    """Says what all leaves take, dense and packed."""
    dense = sum(leaf.bytes for leaf in packed.leaves.values())
    stored = sum(packed.stored_bytes.values())
    words = f'{with_prefix(dense, "B")} dense, {with_prefix(stored, "B")} packed'
    return f'{len(packed.leaves)} leaves, {words} ({stored / max(dense, 1):.2%})'
