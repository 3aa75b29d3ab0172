"""Saves a pytree as one safetensors file; a smaller model, with the plan by which it was cut in the file's header."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import host_arrays, input_files
from jaxpruner.structure import ChannelGraph
from jaxpruner.structure.cut import KeepByGroup, check_keep
from jaxpruner.structure.small_model import parts_of

_PLAN = 'jaxpruner_plan'  # among the metadata
_VERSION = 1  # of the plan


def save_safetensors(
    tree: tree_lib.PyTree, path: Path | str, metadata: Mapping[str, str] | None = None
) -> None:
    """Saves a pytree of arrays as a safetensors file, its leaves under dotted names; pruned weights are zeros in it.

    Arrays that are sharded over the devices of this process come to the host one leaf at a time. The file appears when
    it is whole, and replaces one that is there. `jaxpruner.checkpoints.open_checkpoint` reads it, and so does every
    library that knows the format. Needs the extra `jaxpruner[checkpoint]`.

    Args:
      tree: any pytree of arrays or numbers, such as parameters or masks; leaves that are `None` are skipped.
      path: the file; its folder exists.
      metadata: strings by name, kept in the file's header.

    Raises:
      ValueError: two leaves have one name, or a dtype that safetensors files do not hold; the message names the leaves.
      TypeError: a leaf is no array whose values this process has, or metadata are no strings.
      FileNotFoundError: the folder does not exist.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> from jaxpruner import checkpoints
    >>> tree = {'block': [{'kernel': np.array([[0.0, 2.0]], np.float32), 'bias': None}]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_safetensors(tree, Path(folder, 'model.safetensors'))
    ...     saved = checkpoints.open_checkpoint(folder)
    ...     list(saved.leaves), saved.read('block.0.kernel')
    (['block.0.kernel'], array([[0., 2.]], dtype=float32))
    """
    from jaxpruner.checkpoints.reading import Leaf  # loads libraries that the core does without
    from jaxpruner.checkpoints.writing import write_tensors

    arrays = {name: array for name, (_, array) in host_arrays.named_arrays(tree).items()}
    # Wide numbers first, as the format's own library has it: each tensor then begins where its dtype may.
    names = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    leaves = {name: Leaf(arrays[name].shape, np.dtype(arrays[name].dtype)) for name in names}
    write_tensors(Path(path), leaves, lambda name: host_arrays.on_host(arrays[name]), metadata)


class SmallModel(NamedTuple):
    """What `load_small_model` reads.

    Attributes:
      params: in the structure of those of the whole model.
      keep: name of a group -> the indices that stay, for `ChannelGraph.small_apply`.
      state: as `params`; `None` if none was saved.

    >>> SmallModel({'w': 1}, {}).state is None
    True
    """

    params: tree_lib.PyTree
    keep: dict[str, np.ndarray]
    state: tree_lib.PyTree = None


def save_small_model(
    graph: ChannelGraph,
    params: tree_lib.PyTree,
    keep: KeepByGroup,
    path: str | os.PathLike[str],
    *,
    state: tree_lib.PyTree = None,
) -> None:
    """Saves a smaller model as a safetensors file: its arrays, and in the header what was kept.

    The plan has the size and the kept channels of each group that is cut, and a checksum of arrays. Any library that
    reads safetensors reads the arrays, under the dotted names that `save_safetensors` gives them. The file appears when
    it is whole, and replaces one that is there. Needs the extra `jaxpruner[checkpoint]`.

    Args:
      graph: of the whole model.
      params: what `ChannelGraph.shrink` returned, trained further or not.
      keep: what `shrink` was given.
      path: of the file; its folder exists.
      state: of the smaller model, such as batch statistics, if the model has one.

    Raises:
      TypeError, KeyError, IndexError: as in `ChannelGraph.shrink` and `save_safetensors`.
      ValueError: likewise, or an array has another shape than the plan says.
      OSError: the file cannot be written.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpruner import channel_groups
    >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
    >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
    >>> keep = {'up[1]': [0, 3]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_small_model(graph, graph.shrink(params, keep), keep, f'{folder}/small.safetensors')
    ...     small = load_small_model(graph, f'{folder}/small.safetensors')
    >>> small.params['up'].tolist(), small.keep
    ([[0.0, 3.0], [4.0, 7.0]], {'up[1]': array([0, 3])})
    """
    cut = check_keep(graph.groups, keep, allow_inexact=True)
    arrays: dict[str, Any] = {}
    for part, tree in zip(parts_of(graph), (params, state), strict=True):
        if tree is not None:
            part.check(tree, cut)
            arrays |= zip(map('.'.join, part.leaves), jax.tree.leaves(tree), strict=True)
    from jaxpruner.checkpoints import writing  # loads libraries that the core does without

    groups = {}
    for name, indices in keep.items():
        groups[name] = {'size': graph.groups[name].size, 'keep': np.asarray(indices).tolist()}
    checksum = writing.digest_of(*map(host_arrays.on_host, arrays.values()))
    plan = json.dumps({'version': _VERSION, 'groups': groups, 'checksum': checksum})
    save_safetensors(arrays, Path(path), {_PLAN: plan})


def load_small_model(graph: ChannelGraph, path: str | os.PathLike[str]) -> SmallModel:
    """Reads a smaller model from a file that `save_small_model` wrote.

    Args:
      graph: of the whole model; `channel_groups` makes it of shapes as well, so that nothing has to be initialised.
      path: of the file.

    Returns:
      Parameters, state, and what was kept, for `ChannelGraph.small_apply`.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no safetensors file, or a part of one; it has no plan, or that of another model; its arrays are
        not those that the plan says, or are damaged; or JAX would round them, since they have 64 bits.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpruner import channel_groups
    >>> shapes = {'up': jax.ShapeDtypeStruct((2, 4), 'float32'), 'down': jax.ShapeDtypeStruct((4, 1), 'float32')}
    >>> x = jax.ShapeDtypeStruct((5, 2), 'float32')
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], shapes, x)
    >>> params = {'up': jnp.ones((2, 3)), 'down': jnp.ones((3, 1))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_small_model(graph, params, {'up[1]': [0, 1, 3]}, f'{folder}/small.safetensors')
    ...     small = load_small_model(graph, f'{folder}/small.safetensors')
    >>> graph.small_apply(small.keep)(small.params, jnp.ones((1, 2))).tolist()
    [[6.0]]
    """
    from jaxpruner.checkpoints import open_checkpoint, writing  # load libraries, as above

    path = Path(path)
    checkpoint = open_checkpoint(path)
    try:
        plan = input_files.parse_json(checkpoint.metadata[_PLAN].encode())
        if plan['version'] != _VERSION:
            raise ValueError(f'its version is {plan["version"]!r}, and {_VERSION} is read')
        keep = {name: np.asarray(group['keep']) for name, group in plan['groups'].items()}
        cut = check_keep(graph.groups, keep, allow_inexact=True)
        for name, group in plan['groups'].items():
            own_size = graph.groups[name].size
            if group['size'] != own_size:
                raise ValueError(f'{name} has {group["size"]} channels there, and {own_size} here')
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'{path} has no plan of channels of this model ({error}); save_small_model writes one'
        ) from error

    trees: list[Any] = []
    expected: dict[str, tuple[int, ...]] = {}
    for part in parts_of(graph):
        names = list(map('.'.join, part.leaves))
        if part.name == 'state' and checkpoint.leaves.keys().isdisjoint(names):
            continue  # none was saved
        expected |= zip(names, map(cut.shape, part.leaves.values()), strict=True)
        trees.append(part.treedef.unflatten(names))
    found = {name: leaf.shape for name, leaf in checkpoint.leaves.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f'{path}: {name} has shape {found.get(name)}, and by its plan {expected.get(name)} (None: there is no '
                'such array); save the model anew'
            )

    arrays = {name: checkpoint.read(name) for name in expected}
    if writing.digest_of(*arrays.values()) != plan.get('checksum'):
        raise ValueError(f'{path}: its arrays are damaged; save the model anew')
    on_device = {name: host_arrays.on_device(f'{path}: {name}', arrays[name]) for name in arrays}
    params, *state = jax.tree.map(on_device.get, trees)
    return SmallModel(params, keep, *state)
