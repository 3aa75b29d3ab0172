"""Plans: JSON files with the channels that are kept. They are saved, loaded, and checked against the model."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np

from jaxpruner import caller_warnings
from jaxpruner import tree as tree_lib
from jaxpruner.files import atomic_files, input_files
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.cut import KeepByGroup, check_keep
from jaxpruner.structure.graph import ChannelGraph

VERSION = 1
_FORMAT = 'jaxpruner channels'


def save_plan(graph: ChannelGraph, keep: KeepByGroup, path: str | os.PathLike[str]) -> None:
    """Writes the channels that are kept to a JSON file, which appears whole or not at all.

    The file has a version, the number of channels and the kept indices of each group, the shapes of all parameters
    before and after, and a hash of the traced program.

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
    plan = {
        'format': _FORMAT,
        'version': VERSION,
        'groups': groups,
        'parameters': shapes,
        'program': _program_hash(graph),
    }
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

    There is a warning if parameters and groups are the same but the program is not, because of inputs of other shapes
    or another version of JAX.

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
        if plan['format'] != _FORMAT:
            raise ValueError(f'its format is {plan["format"]!r}')
        version = plan['version']
        if version != VERSION:  # another version may hold anything
            plan = {'groups': {}, 'parameters': {}, 'program': ''}
        keep = {name: np.asarray(group['keep']) for name, group in plan['groups'].items()}
        sizes = {name: group['size'] for name, group in plan['groups'].items()}
        shapes = {name: entry['before'] for name, entry in plan['parameters'].items()}
        program = plan['program']
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{path} is no plan of channels ({error}); save_plan writes one') from None
    if version != VERSION:
        raise ValueError(
            f'{path} is a plan of version {version!r}, and this is read: {VERSION}; install the jaxpruner that wrote it'
        )
    own_shapes = {
        tree_lib.path_string(leaf): list(sizes_of(axes)) for leaf, axes in graph.trace.named_leaves
    }
    for name, shape in own_shapes.items():
        if shapes.get(name) != shape:
            other = f'has shape {shapes[name]} there' if name in shapes else 'is not there'
            raise ValueError(
                f'{path} is a plan of another model: {name}, of shape {shape}, {other}'
            )
    for name in shapes:
        if name not in own_shapes:
            raise ValueError(f'{path} is a plan of another model, with a parameter {name!r}')
    for name, size in sizes.items():
        own_size = graph.groups[name].size if name in graph.groups else None
        if own_size != size:
            own = 'has no such group' if own_size is None else f'has {own_size}'
            raise ValueError(
                f'{path} is a plan of another model: of group {name!r} it has {size} channels, this model {own}'
            )
    try:
        check_keep(graph.groups, keep, allow_inexact=True)
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: {error}') from error
    if program != _program_hash(graph):
        caller_warnings.warn(
            f'{path} was made for another program with the same groups, such as one of other inputs or of another '
            'version of JAX; graph.verify(params, keep, *inputs) tells whether it still holds'
        )
    return keep


def _program_hash(graph: ChannelGraph) -> str:
    """A hash of the programs' text, without the addresses of functions."""
    programs = [str(trace.program) for trace in graph.traces]
    text = re.sub(r'0x[0-9a-f]+', '', '\n'.join(programs))
    return hashlib.sha256(text.encode()).hexdigest()
