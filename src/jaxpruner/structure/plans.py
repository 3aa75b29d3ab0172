"""Plans: JSON files with the channels that are kept. They are saved, loaded, and checked against the model."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import atomic_files, input_files
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.cut import KeepByGroup, check_keep
from jaxpruner.structure.graph import ChannelGraph

VERSION = 1
_FORMAT = 'jaxpruner channels'


def save_plan(graph: ChannelGraph, keep: KeepByGroup, path: str | os.PathLike[str]) -> None:
    """Writes the channels that are kept to a JSON file, which appears whole or not at all.

    The file has a version, the number of channels and the kept indices of each group, and the shapes of all parameters
    before and after.

    Args:
      graph: of the model.
      keep: as in `ChannelGraph.shrink`. Groups that are not exact are written, too.
      path: of the file.

    Raises:
      TypeError, KeyError, IndexError, ValueError: as in `ChannelGraph.shrink`.
      OSError: the file cannot be written.

    >>> import tempfile, jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1))}
    >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plan(graph, {'up[1]': [0, 3]}, f'{folder}/plan.json')
    ...     os.listdir(folder)
    ['plan.json']
    """
    text = plan_text(graph, keep)
    atomic_files.replace_file(Path(path), lambda temporary: temporary.write_text(text))


def plan_text(graph: ChannelGraph, keep: KeepByGroup) -> str:
    """The plan as JSON."""
    cut = check_keep(graph.groups, keep, allow_inexact=True)
    groups = {
        name: {'size': graph.groups[name].size, 'keep': np.asarray(indices).tolist()}
        for name, indices in keep.items()
    }
    shapes = {
        tree_lib.path_string(leaf): {'before': sizes_of(axes), 'after': cut.shape(axes)}
        for leaf, axes in graph.trace.named_leaves
    }
    plan = {'format': _FORMAT, 'version': VERSION, 'groups': groups, 'parameters': shapes}
    return json.dumps(plan, indent=1)


def load_plan(graph: ChannelGraph, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the channels that are kept from a file that `save_plan` wrote.

    Args:
      graph: of the model, with parameters of the same shapes. A new initialisation is enough.
      path: of the file.

    Returns:
      Name of a group -> the indices that stay, for `ChannelGraph.shrink`.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is no plan, or it is a plan of a newer version or of another model.

    >>> import tempfile, jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1))}
    >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plan(graph, {'up[1]': [0, 3]}, f'{folder}/plan.json')
    ...     keep = load_plan(graph, f'{folder}/plan.json')
    >>> graph.shrink(params, keep)['down'].shape
    (2, 1)
    """
    path = Path(path)
    return keep_of_json(graph, input_files.read_file(path), path)


def keep_of_json(graph: ChannelGraph, content: bytes, path: Path) -> dict[str, np.ndarray]:
    """The channels that the plan in a file keeps, checked as `load_plan` does."""
    try:
        plan = input_files.parse_json(content)
        if (plan['format'], plan['version']) != (_FORMAT, VERSION):
            raise ValueError(
                f'its format is {plan["format"]!r} of version {plan["version"]!r}, and {VERSION} is read'
            )
        keep = {name: np.asarray(group['keep']) for name, group in plan['groups'].items()}
        sizes = {name: entry['before'] for name, entry in plan['parameters'].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{path} is no plan of channels ({error}); save_plan writes one') from None
    own_sizes: dict[str, Any] = {
        tree_lib.path_string(leaf): list(sizes_of(axes)) for leaf, axes in graph.trace.named_leaves
    }
    for name in (*own_sizes, *sizes):
        size, own_size = sizes.get(name, 'absent'), own_sizes.get(name, 'absent')
        if size != own_size:
            raise ValueError(
                f'{path} is a plan of another model: {name} is {size} there, and {own_size} here'
            )
    try:
        check_keep(graph.groups, keep, allow_inexact=True)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: {error}') from error
    return keep
