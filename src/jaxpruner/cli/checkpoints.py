"""`jaxpruner inspect`, `prune`, `pack` and `unpack`: checkpoints on disk, tensor by tensor."""

import json
import pkgutil
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from jaxpruner import text_tables
from jaxpruner.cli import options
from jaxpruner.plan import type_words
from jaxpruner.progress import leaf_progress
from jaxpruner.sparsity_types import NByM
from jaxpruner.structure import ChannelGraph
from jaxpruner.text_tables import Column, with_prefix

if TYPE_CHECKING:
    from jaxpruner.sparse.storage.packed_files import PackedFile

_LEAF = Column('leaf', overflow='fold')


def _print_table(columns: Sequence[Column], rows: Any, total: Sequence[str] | None = None) -> None:
    """Prints a table that fits the terminal."""
    print(text_tables.to_text(columns, list(rows), total, shutil.get_terminal_size().columns))


def _numbers(*headings: str) -> list[Column]:
    return [Column(heading, align='right') for heading in headings]


def _bytes(*counts: int) -> list[str]:
    return [with_prefix(count, 'B') for count in counts]


def _sizes(checkpoint: Any) -> dict[str, int]:
    return {name: leaf.bytes for name, leaf in checkpoint.leaves.items()}


def inspect(
    checkpoint: options.CheckpointPath,
    *,
    graph: str | None = None,
    as_json: Annotated[bool, arg(name='json')] = False,
    progress: bool = True,
) -> None:
    """Show sparsity, structure and bytes of each tensor in a checkpoint.

    Structure is N:M (of each M weights along an axis at most N are not zero), blocks over the last two axes, and
    channels that are zero throughout. Packed is what `jaxpruner pack` would write: each tensor in its smallest format.

    Args:
      checkpoint: a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder of orbax.
      graph: a ChannelGraph of the model, or a function that returns one, such as mine:graph for graph in mine.py here;
        the channels that can be removed without a change of the results are then named, too.
      as_json: print JSON instead of tables.
      progress: show a progress bar if stderr is a terminal.
    """
    from jaxpruner import checkpoints
    from jaxpruner.checkpoints.inspection import zero_groups
    from jaxpruner.sparse.storage import packed_files

    channels = None if graph is None else _load_graph(graph)
    opened = packed_files.open_packed_or_dense(checkpoint)
    leaves = []
    nonzeros = packed_bytes = 0
    with leaf_progress(_sizes(opened), progress) as on_leaf:
        for one in checkpoints.inspect_leaves(opened, on_leaf):
            sizes, smallest = packed_files.format_bytes(opened, one.name)
            leaves.append({**one.as_dict(), 'formats': sizes, 'smallest': smallest})
            nonzeros += one.nonzeros
            packed_bytes += sizes[smallest] or 0
    weights = sum(leaf.size for leaf in opened.leaves.values())
    total = {
        'leaves': len(leaves),
        'weights': weights,
        'sparsity': 1 - nonzeros / weights if weights else 0.0,
        'bytes': sum(leaf.bytes for leaf in opened.leaves.values()),
        'packed_bytes': packed_bytes,
    }
    content = {'leaves': leaves, 'total': total, 'metadata': dict(opened.metadata)}
    if channels is not None:
        zeros = zero_groups(opened, channels)
        content['zero_channels'] = {name: each.tolist() for name, each in zeros.items()}
    if as_json:
        print(json.dumps(content, indent=2))
        return
    _print_leaves(leaves, total)
    if channels is None:
        return
    rows = []
    for name, zero in content['zero_channels'].items():
        size = str(channels.groups[name].size)
        rows.append([name, size, str(len(zero)), text_tables.ranges(zero)])
    print()
    if rows:
        columns = [Column('group', overflow='fold'), *_numbers('channels', 'zero')]
        _print_table([*columns, Column('which of them', overflow='wrap')], rows)
    else:
        print(f'no channels of the {len(channels.groups)} groups of the model are zero')


def _load_graph(name: str) -> ChannelGraph:
    """Loads the graph that stands in a module, or calls the function there that returns it."""
    options.import_modules(())  # a module may lie here
    try:
        graph = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f'--graph {name}: {error}') from None
    graph = graph() if callable(graph) else graph
    if not isinstance(graph, ChannelGraph):
        raise TypeError(
            f'--graph {name} is no ChannelGraph, but {type(graph).__name__}; name what jaxpruner.channel_groups '
            'returned, such as mine:graph for graph in mine.py'
        )
    return graph


def _print_leaves(leaves: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> None:
    """Prints a row for each leaf or for equal layers, and below it the structures that were found."""
    names = [leaf['name'] for leaf in leaves]
    alike = [
        ('×'.join(map(str, leaf['shape'])), leaf['dtype'], leaf['smallest']) for leaf in leaves
    ]
    rows, structures = [], []
    for name, indices in text_tables.group_layers(names, alike):
        shape, dtype, smallest = alike[indices[0]]
        group = [leaves[i] for i in indices]
        sparsity = text_tables.span([leaf['sparsity'] for leaf in group], '{:.2%}'.format)
        packed = sum(leaf['formats'][smallest] for leaf in group)
        sizes = _bytes(sum(leaf['bytes'] for leaf in group), packed)
        rows.append([name, shape or 'scalar', dtype, sparsity, *sizes, smallest])
    last = [f'{len(leaves)} leaves', f'{total["weights"]:,}', '', f'{total["sparsity"]:.2%}']
    columns = [_LEAF, Column('shape'), Column('dtype'), *_numbers('sparsity', 'dense', 'packed')]
    last += [*_bytes(total['bytes'], total['packed_bytes']), '']
    _print_table([*columns, Column('format')], rows, last)
    for leaf in leaves:
        words = []
        if leaf['n_of_m']:
            words.append('{n}:{m} along axis {axis}'.format(**leaf['n_of_m']))
        if leaf['block']:
            words.append('blocks {}×{}'.format(*leaf['block']))
        for axis, dead in enumerate(leaf['dead_indices']):
            if dead:
                count = f'{len(dead)} of {leaf["shape"][axis]} dead along axis {axis}'
                words.append(f'{count}: {text_tables.ranges(dead)}')
        structures.append(', '.join(words))
    groups = text_tables.group_layers(names, structures)
    rows = [[name, structures[i]] for name, (i, *_) in groups if structures[i]]
    if rows:
        print()
        _print_table([_LEAF, Column('structure of its zeros', overflow='wrap')], rows)


def prune(
    checkpoint: options.CheckpointPath,
    *,
    out: Path,
    sparsity: float | None = None,
    distribution: Literal['uniform', 'erk'] = 'uniform',
    types: options.Values = (),
    only: options.Values = (),
    skip: options.Values = (),
    masks_out: Path | None = None,
    modules: options.Values = (),
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a checkpoint in which the weights of least magnitude are zero.

    All other scores need the model: jaxpruner.prune in Python.

    An optimizer's state stays as it is, and so does what looks like an embedding or an output head, unless a name in
    --types or --only matches it. Names may be globs, in which `*` stands for anything.

    Args:
      checkpoint: a .safetensors file, a folder with one or with a model.safetensors.index.json (OUT is then a folder of
        shards), or a folder of orbax.
      out: what to write: a .safetensors file, or a folder for shards.
      sparsity: share of weights to remove, in [0, 1]; N:M types do without.
      distribution: how the sparsity is shared among tensors: the same for each, or small ones denser.
      types: NAME=TYPE, such as '*mlp*=2:4' '*=dense': which weights stand together; the first name that matches counts,
        TYPE alone is for the others. A type is unstructured, 2:4, nm_2,4,0 (along axis 0), block_4,4, channel_-1 or
        dense. N:M along the inputs is 2:4 for PyTorch, nm_2,4,-2 for kernels of flax and Haiku.
      only: names of the tensors to prune; a vector only by its full name.
      skip: names of tensors to leave as they are.
      masks_out: also write the masks there, as uint8 safetensors, 1 where a weight is kept.
      modules: your own modules, imported first, such as mine for mine.py here; they may register sparsity types.
      overwrite: replace a file that is there.
      progress: show a progress bar if stderr is a terminal.
    """
    from jaxpruner import checkpoints
    from jaxpruner.checkpoints.choosing import LOOKS_LIKE_EMBEDDING, LOOKS_LIKE_HEAD
    from jaxpruner.sparse.storage.packed_files import open_packed_or_dense

    options.import_modules(modules)
    opened = open_packed_or_dense(checkpoint)
    leaves = opened.leaves
    rules = []
    for name, _, text in (rule.rpartition('=') for rule in options.flat(types)):
        rules.append((name or None, text.strip()))
    names = options.flat(only), options.flat(skip)
    choices = checkpoints.choose(leaves, sparsity, distribution, rules, *names)
    with leaf_progress(_sizes(opened), progress) as on_leaf:
        kept = checkpoints.prune(
            opened,
            out,
            choices,
            masks_out=masks_out,
            overwrite=overwrite,
            on_leaf=on_leaf,
        )
    size = sum(leaf.size for leaf in kept)
    removed = size - sum(leaf.kept for leaf in kept)
    total = sum(leaf.size for leaf in leaves.values())
    print(
        f'{out}: {len(kept)} of {len(leaves)} tensors pruned, {removed:,} of their {size:,} '
        f'weights removed ({removed / max(size, 1):.2%}; {removed / max(total, 1):.2%} of all {total:,})'
    )
    reasons = checkpoints.left_out(leaves, rules, *names)
    names_of: dict[str, list[str]] = {}
    for name in sorted(leaves, key=lambda name: name in reasons):  # those that were pruned first
        words = f'left: {reasons[name]}' if name in reasons else _pruned(name, choices[name].kind)
        names_of.setdefault(words, []).append(name)
    rows = []
    for words, alike in names_of.items():
        weights = sum(leaves[name].size for name in alike)
        rows.append([str(len(alike)), f'{weights:,}', words, alike[0]])
    sentence = Column('what happened', overflow='wrap')
    first = Column('first of them', overflow='fold')
    _print_table([*_numbers('tensors', 'weights'), sentence, first], rows)
    looked_up = (LOOKS_LIKE_EMBEDDING, LOOKS_LIKE_HEAD)
    dense = [text_tables.printable(name) for name in reasons if reasons[name] in looked_up]
    if dense:
        remedy = f"--types '*={dict(rules).get(None, 'unstructured')}' prunes them, too"
        text = f'left dense for their names: {", ".join(dense)}; {remedy}'
        print(textwrap.fill(text, shutil.get_terminal_size().columns, break_on_hyphens=False))


def _pruned(name: str, sparsity_type: Any) -> str:
    words = f'pruned: {type_words(sparsity_type)}'
    is_of_flax = name.removesuffix('/value').endswith('kernel')
    if is_of_flax and isinstance(sparsity_type, NByM) and sparsity_type.axis == -1:
        pattern = f'nm_{sparsity_type.n},{sparsity_type.m},-2'
        words += f', the outputs of kernels (inputs, outputs); {pattern} lies along their inputs'
    return words


def pack(
    checkpoint: options.CheckpointPath,
    *,
    out: Path,
    masks: Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a checkpoint as one safetensors file in which each tensor has its smallest format.

    `jaxpruner unpack` writes the tensors as they were, bit by bit, and jaxpruner.sparse.load reads them in Python.

    Args:
      checkpoint: a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder of orbax.
      out: the file to write.
      masks: what `jaxpruner prune --masks-out` wrote decides, so that weights of a mask that are zero are kept, too.
      overwrite: replace a file that is there.
      progress: show a progress bar if stderr is a terminal.
    """
    from jaxpruner import checkpoints, sparse
    from jaxpruner.sparse.storage.packed_files import MANIFEST_KEY

    opened = checkpoints.open_checkpoint(checkpoint)
    if MANIFEST_KEY in opened.metadata:
        raise ValueError(
            f'{opened.path} is packed already; name another checkpoint, or unpack it first'
        )
    sparse.save(
        out,
        opened,
        masks=None if masks is None else checkpoints.open_checkpoint(masks),
        metadata=opened.metadata,
        overwrite=overwrite,
        progress=progress,
    )
    print(f'{out}: {_packing_words(sparse.open_packed(out))}')


def unpack(
    packed: options.CheckpointPath, *, out: Path, overwrite: bool = False, progress: bool = True
) -> None:
    """Write a packed file as an ordinary safetensors file, bit by bit what was packed.

    Args:
      packed: a file that `jaxpruner pack` or jaxpruner.sparse.save wrote.
      out: the .safetensors file to write.
      overwrite: replace a file that is there.
      progress: show a progress bar if stderr is a terminal.
    """
    from jaxpruner import sparse
    from jaxpruner.checkpoints.writing import write_tensors

    opened = sparse.open_packed(packed)
    with leaf_progress(_sizes(opened), progress) as on_leaf:

        def read(name: str) -> Any:
            on_leaf(name)
            return opened.read(name)

        write_tensors(out, opened.leaves, read, opened.metadata, overwrite)
    print(f'{out}: {_packing_words(opened)}')


def _packing_words(packed: 'PackedFile') -> str:
    """Says what all leaves take, dense and packed."""
    dense = sum(leaf.bytes for leaf in packed.leaves.values())
    stored = sum(packed.stored_bytes.values())
    words = '{} dense, {} packed'.format(*_bytes(dense, stored))
    return f'{len(packed.leaves)} leaves, {words} ({stored / max(dense, 1):.2%})'
