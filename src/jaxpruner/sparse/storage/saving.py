"""Trees saved as packed files, leaf by leaf."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse.formats import element_types, table
from jaxpruner.sparse.formats.base import ArraySpec, Plan
from jaxpruner.sparse.storage import manifest
from jaxpruner.sparse.storage.digests import NO_DIGEST, digest_of
from jaxpruner.sparse.storage.extra import checkpoints_for
from jaxpruner.sparse.storage.leaves import SourceLeaf, check_sources, leaves_of_tree

if TYPE_CHECKING:
    from jaxpruner.checkpoints import Checkpoint, Leaf


def save(
    path: os.PathLike[str] | str,
    tree: tree_lib.PyTree,
    *,
    masks: Any = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = True,
    progress: bool = True,
) -> None:
    """Saves a tree as one safetensors file, each leaf in the format of the fewest bytes.

    The formats are those of `pack`. A manifest in the file's header names the format, dtype and shape of each leaf. It
    has a digest of each leaf's bytes, and one of itself with the metadata: they show damage. The file appears when it
    is whole. Leaves are fetched and packed one at a time. Needs the extra `jaxpruner[checkpoint]`.

    Element types that readers of the format lack (float8, int4, complex) are stored as unsigned whole numbers.

    Args:
      path: the file; its folder exists.
      tree: any pytree of arrays, such as parameters or an optimizer state; or a `jaxpruner.checkpoints.Checkpoint`.
      masks: what is kept: a tree of masks, packed or not, `None` where the values decide; or an optimizer state with
        one `SparseState`. Without masks, all but the bit pattern of +0 is kept. If the tree is a checkpoint, the masks
        are another one, under the names of its leaves.
      metadata: strings by name, kept in the file's header.
      overwrite: whether a file that is there is replaced.
      progress: whether a bar is shown if stderr is a terminal.

    Raises:
      TypeError: a leaf is no array whose values this process has, or metadata are no strings.
      ValueError: two leaves have one name, or a mask does not fit or removes what is not +0.
      FileExistsError: a file is there that must not be replaced.
      FileNotFoundError: the folder does not exist.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> from jaxpruner import sparse
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, 'a.safetensors')
    ...     sparse.save(path, {'w': np.eye(256, dtype=np.float32)})
    ...     path.stat().st_size < 3200, sparse.load(path)['w'].shape
    (True, (256, 256))
    """
    checkpoints = checkpoints_for('save')
    from jaxpruner.checkpoints.pruning import check_target

    path = Path(path)
    metadata = metadata or {}
    _check_metadata(metadata)
    check_target(path, overwrite, path.is_dir())
    if isinstance(tree, checkpoints.Checkpoint):
        sources = _leaves_of_checkpoint(tree, masks)
    else:
        sources = leaves_of_tree(tree, masks)
    with _leaf_progress(sources, progress, rounds=2) as on_leaf:
        planned = []
        for source in sources:
            on_leaf(source)
            planned.append(_PlannedLeaf.of(source))
        _write(path, planned, metadata, overwrite, on_leaf)


def _check_metadata(metadata: Mapping[Any, Any]) -> None:
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f'metadata must map strings to strings, got {name!r}: {text!r}')
        if name == manifest.MANIFEST_KEY:
            raise ValueError(f'metadata: {name} is the name of the manifest; choose another one')


def _leaves_of_checkpoint(checkpoint: 'Checkpoint', masks: 'Checkpoint | None') -> list[SourceLeaf]:
    """Lists the leaves of a checkpoint, whose names stay as they are."""
    masks_by_name: Sequence[str] = [] if masks is None else list(masks.leaves)
    for name in masks_by_name:
        if name not in checkpoint.leaves:
            raise ValueError(
                f'masks: {name!r} is no tensor of {checkpoint.path}; '
                f'{tree_lib.nearest(name, list(checkpoint.leaves))}'
            )
    sources = []
    for name, leaf in checkpoint.leaves.items():
        read_mask = None
        if masks is not None and name in masks_by_name:
            read_mask = functools.partial(masks.read, name)
        source = SourceLeaf(
            path=(name,),
            shape=leaf.shape,
            dtype=leaf.dtype,
            read_values=functools.partial(checkpoint.read, name),
            read_mask=read_mask,
        )
        sources.append(source)
    check_sources(sources)
    return sources


class _PlannedLeaf(NamedTuple):
    """A leaf that is about to be written.

    Attributes:
      source: where its values come from.
      plan: the arrays that it takes.
      entry: what the manifest says about it.
    """

    source: SourceLeaf
    plan: Plan
    entry: manifest.Entry

    @classmethod
    def of(cls, source: SourceLeaf) -> '_PlannedLeaf':
        """Plans a leaf."""
        pattern = source.pattern(source.values())
        plan = table.best_plan(pattern, source.dtype)
        entry = manifest.Entry(
            source.name, source.path, plan.format_name, source.dtype, source.shape, NO_DIGEST
        )
        return cls(source, plan, entry)

    def packed(self) -> dict[str, np.ndarray]:
        """Packs the leaf into the arrays that are stored. The values are freed before these are written."""
        arrays = _packed(self.source, self.plan)
        stored = {}
        for key in self.plan.arrays:  # in the order of the file
            stored[key] = element_types.to_stored(arrays[key])
        return stored


def _write(
    path: Path,
    leaves: Sequence[_PlannedLeaf],
    metadata: Mapping[str, str],
    overwrite: bool,
    on_leaf: Any,
) -> None:
    """Writes the file, and its manifest once more in the end, when all digests are known."""
    from jaxpruner.checkpoints import SafetensorsWriter

    tensors = _tensors_of(leaves)
    entries = [leaf.entry for leaf in leaves]
    texts = {**metadata, manifest.MANIFEST_KEY: manifest.to_text(entries, metadata)}
    with SafetensorsWriter(path, tensors, texts, overwrite=overwrite) as writer:
        for number, leaf in enumerate(leaves):
            on_leaf(leaf.source)
            arrays = leaf.packed()
            digest = digest_of(arrays)
            entries[number] = leaf.entry._replace(digest=digest)
            for key, array in arrays.items():
                writer.write(leaf.entry.tensor_name(key), array)
        texts[manifest.MANIFEST_KEY] = manifest.to_text(entries, metadata)
        writer.replace_metadata(texts)


def _tensors_of(leaves: Sequence[_PlannedLeaf]) -> dict[str, 'Leaf']:
    """The tensors of a file, in their order.

    Raises:
      ValueError: two leaves claim a name, or one that is taken.
    """
    from jaxpruner.checkpoints import Leaf
    from jaxpruner.checkpoints.safetensors_reader import METADATA_KEY

    tensors: dict[str, Leaf] = {}
    for leaf in leaves:
        for key, spec in leaf.plan.arrays.items():
            tensor = leaf.entry.tensor_name(key)
            if tensor == METADATA_KEY:
                raise ValueError(
                    f'{tensor}: safetensors files keep this name for metadata; rename the leaf'
                )
            if tensor in tensors:
                raise ValueError(
                    f'{leaf.source.name}: its array {tensor!r} is the name of another leaf; rename one'
                )
            stored = _stored_spec(spec)
            tensors[tensor] = Leaf(stored.shape, stored.dtype)
    return tensors


def _packed(source: SourceLeaf, plan: Plan) -> Mapping[str, np.ndarray]:
    values = source.values()
    if plan.format_name == 'dense':
        return {'values': values}
    mask = source.pattern(values).mask
    entry = table.FORMATS[plan.format_name]
    return entry.pack(values, mask, plan)


def _stored_spec(spec: ArraySpec) -> ArraySpec:
    shape = element_types.stored_shape(spec.shape, spec.dtype)
    dtype = element_types.stored_dtype(spec.dtype)
    return ArraySpec(shape, dtype)


@contextlib.contextmanager
def _leaf_progress(sources: Sequence[SourceLeaf], is_shown: bool, rounds: int) -> Iterator[Any]:
    """Shows which leaf is being read; yields a function to call before a leaf is read."""
    total = rounds * sum(source.bytes for source in sources)
    with progress_bar(total, is_shown, in_bytes=True) as show:
        bytes_behind = 0

        def on_leaf(source: SourceLeaf) -> None:
            nonlocal bytes_behind
            show(source.name, bytes_behind)
            bytes_behind += source.bytes

        yield on_leaf
