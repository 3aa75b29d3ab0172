"""Groups of a model's channels that are zero in a checkpoint."""

import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.checkpoints.base import Checkpoint
from jaxpruner.structure import ChannelGraph


def zero_groups(checkpoint: Checkpoint, graph: ChannelGraph) -> dict[str, np.ndarray]:
    """Finds the channels that can be removed from a model with these parameters, and nothing changes.

    Leaves are read one after another; a byte for each weight is held.

    Args:
      checkpoint: an open one, which may hold more than the model's parameters.
      graph: of the model.

    Returns:
      As `ChannelGraph.zero_channels`.

    Raises:
      ValueError: the checkpoint lacks a parameter of the model, or has it in another shape.

    >>> import pathlib, tempfile
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': np.ones((2, 4)), 'down': np.array([[1.0], [0.0], [0.0], [1.0]])}
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, np.ones((1, 2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(pathlib.Path(folder) / 'a.safetensors', params)
    ...     zero_groups(open_checkpoint(folder), graph)
    {'up[1]': array([1, 2])}
    """
    flags = []
    for name in _names(graph.trace.paths, checkpoint.leaves):
        array = checkpoint.read(name)
        flags.append(array != np.zeros((), array.dtype))
    params = jax.tree.unflatten(jax.tree.structure(graph.model.params), flags)
    return graph.zero_channels(params)


def _names(paths: Sequence[tree_lib.Path], found: Iterable[str]) -> list[str]:
    """Finds the names of a model's parameters in a checkpoint, before which something may stand, such as `params`."""
    name_of = {_parts(name): name for name in found}
    wanted = list(map(tree_lib.path_string, paths))
    prefix = _prefix(list(map(_parts, wanted)), name_of)
    names = []
    for parameter in wanted:
        name = name_of.get(prefix + _parts(parameter))
        if name is None:
            nearest = tree_lib.nearest(parameter, name_of.values())
            raise ValueError(
                f'the checkpoint lacks {parameter!r}, a parameter of the model; {nearest}'
            )
        names.append(name)
    return names


def _parts(name: str) -> tree_lib.Path:
    """Splits a name into parts, which dots or slashes divide; flax's variables are in a box called value."""
    parts = tuple(re.split('[./]', name))
    return parts[:-1] if len(parts) > 1 and parts[-1] == 'value' else parts


def _prefix(wanted: Sequence[tree_lib.Path], name_of: Mapping[tree_lib.Path, str]) -> tree_lib.Path:
    """Finds the shortest prefix with which all parameters are there."""
    length = len(wanted[0])
    for parts in sorted(name_of, key=len):
        prefix = parts[:-length]
        expected = {prefix + each for each in wanted}
        if expected <= name_of.keys():
            return prefix
    return ()
