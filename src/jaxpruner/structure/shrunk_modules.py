"""Makes a module with smaller arrays, and checks that its own code follows them.

A module's code may hold widths as numbers: `x.reshape(n, self.num_heads, -1)`. It may also compute numbers from its new
widths where the zeroed model has the old ones, such as the mean of a LayerNorm. So the module runs on the inputs, and
has to give what the whole module gives with zeros at the removed channels. If it does not, layers whose own arrays were
cut get their new widths, such as `nnx.Conv.feature_group_count`. No other numbers are set.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpruner.structure import small_model
from jaxpruner.structure.axes import atoms, sizes_of
from jaxpruner.structure.cut import KeepByGroup, check_keep
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.modules import ModelArrays
from jaxpruner.tree import Path, PyTree

_MOST_NAMES = 6  # in a message

# Path of an attribute -> its old value, and the new one; `None` if the layer's own arrays do not say it.
Numbers = Mapping[Path, tuple[Any, Any]]


def shrunk_module(
    arrays: ModelArrays, graph: ChannelGraph, keep: KeepByGroup, allow_inexact: bool
) -> tuple[Any, Numbers]:
    """Makes the smaller module.

    Returns:
      The module, and the numbers that were set on it.

    Raises:
      ValueError: its code does not follow the arrays. If inexact groups are allowed, it is enough that it runs.
    """
    whole = [arrays.params] if arrays.state is None else [arrays.params, arrays.state]
    zeroed = [graph.zeroed(tree, keep, allow_inexact=True) for tree in whole]
    small = [graph.shrink(tree, keep, allow_inexact=True, verify=False) for tree in whole]
    arguments = [(*trees, *arrays.inputs) for trees in (whole, zeroed, small)]
    small_apply = small_model.SmallApply(graph, 0, keep, allow_inexact=True)
    module = arrays.make(arrays.params, arrays.state)
    held = _held_numbers(module, graph, keep)
    of_layers = {path: widths for path, widths in held.items() if widths[1] is not None}

    def make_with(numbers: Numbers, params: PyTree, state: PyTree = None) -> Any:
        return set_numbers(arrays.make(params, state), type(module), numbers)

    running, fault = None, ''
    for numbers in ({}, of_layers) if of_layers else ({},):
        candidate = dataclasses.replace(arrays, make=functools.partial(make_with, numbers))
        runs, fault = _fault(arrays, candidate, small_apply, arguments)
        if runs:
            running = candidate, numbers
        if not fault:
            break
    if running is not None and (allow_inexact or not fault):
        candidate, numbers = running
        return candidate.make(*small), numbers
    others = [f'{".".join(path)}={old}' for path, (old, new) in held.items() if new is None]
    remedies = [
        'give shrink the pair (apply_fn, params), which has no code that has to follow',
        'build the module at the smaller sizes',
        f'keep groups whole with leave= (cut were {_listed(keep)})',
    ]
    if running is not None:
        remedies.append('take the module as it is, to be trained on, with allow_inexact=True')
    raise ValueError(
        f'the code of {type(module).__name__} does not follow its smaller arrays: {fault}'
        f'{"; it holds " + _listed(others) if others else ""}. Remedies: {"; ".join(remedies)}'
    )


def _fault(
    arrays: ModelArrays,
    candidate: ModelArrays,
    small_apply: small_model.SmallApply,
    arguments: Sequence[Any],
) -> tuple[bool, str]:
    """Whether a smaller module runs, and what is wrong with it.

    Args:
      arrays: of the whole module.
      candidate: of the smaller module.
      small_apply: the smaller program.
      arguments: unchanged, zeroed and cut.
    """

    def shapes_of(apply_fn: Callable[..., Any]) -> list[tuple[int, ...]]:
        results = jax.eval_shape(apply_fn, *arguments[-1])
        return [leaf.shape for leaf in jax.tree.leaves(results)]

    expected = shapes_of(small_apply)
    try:
        shapes = shapes_of(candidate.apply)
    except Exception as error:  # whatever the module's code raises
        first_line = str(error).partition('\n')[0]
        return False, f'{type(error).__name__}: {first_line}'
    if shapes != expected:
        return False, f'it returns {shapes} instead of {expected}'
    with jax.default_matmul_precision('highest'):
        verification = small_model.verify(
            arrays.apply, candidate.apply, arguments, small_apply.cut_results
        )
    is_different = verification.verdict == 'different'
    return True, f'its results differ ({verification})' if is_different else ''


def _listed(names: Iterable[str]) -> str:
    """Names in a row, one for those of repeated layers."""
    globs = [
        '.'.join('*' if part.isdigit() else part for part in name.split('.')) for name in names
    ]
    globs = list(dict.fromkeys(globs))
    more = [f'and {len(globs) - _MOST_NAMES} more'] if len(globs) > _MOST_NAMES else []
    return ', '.join(globs[:_MOST_NAMES] + more)


def _held_numbers(module: Any, graph: ChannelGraph, keep: KeepByGroup) -> Numbers:
    """The attributes of a module and of those in it that are old widths of their arrays, or of arrays further down.

    Such a width is a whole number, or a tuple that is the shape of an array. Those in configurations count, too. The
    new value is known if an array of the module itself has this width, and all widths of this value change alike.
    """
    cut = check_keep(graph.groups, keep, allow_inexact=True)
    widths: dict[tuple[Path, Any], set[Any]] = defaultdict(set)  # of a module and an old width
    of_own_arrays = set()
    for trace in graph.traces:
        for path, axes in (*trace.named_leaves, *trace.named_states):
            pairs: set[tuple[Any, Any]] = {(sizes_of(axes), cut.shape(axes))}
            pairs.update((axis.size, cut.size(axis)) for axis in (*axes, *atoms(*axes)))
            for old, new in pairs:
                of_own_arrays.add((path[:-1], old))
                for depth in range(len(path)):
                    widths[path[:depth], old].add(new)
    paths = {path for path, _ in widths}
    held: dict[Path, tuple[Any, Any]] = {}
    for path in sorted(paths, key=len):
        attributes = {(name,): value for name, value in _fields(_submodule(module, path)).items()}
        for name, value in list(attributes.items()):
            if dataclasses.is_dataclass(value) and (*path, *name) not in paths:  # a configuration
                attributes |= {(*name, field): inner for field, inner in _fields(value).items()}
        for name, old in attributes.items():
            if not all(type(value) is int for value in (old if isinstance(old, tuple) else [old])):
                continue
            news = widths.get((path, old), {old})
            if news != {old}:
                is_plain = len(news) == 1 and len(name) == 1 and (path, old) in of_own_arrays
                held[(*path, *name)] = old, next(iter(news)) if is_plain else None
    return held


def _fields(node: Any) -> Mapping[str, Any]:
    return getattr(node, '__dict__', {})


def _submodule(module: Any, path: Path) -> Any:
    """The module at a path; `None` if there is none."""
    for name in path:
        if isinstance(module, Mapping):
            module = {str(key): value for key, value in module.items()}.get(name)
        elif isinstance(module, Sequence):
            module = module[int(name)]
        else:
            module = getattr(module, name, None)
    return module


def set_numbers(tree: PyTree, kind: type, numbers: Numbers) -> PyTree:
    """Sets numbers on each module of a class in a tree whose nodes nothing else holds.

    A tree like the module, such as moments, has the structure of the module, numbers included.
    """

    def set_on(node: Any) -> Any:
        if type(node) is kind:
            for path, (_, new) in numbers.items():
                # Modules of Equinox are frozen.
                object.__setattr__(_submodule(node, path[:-1]), path[-1], new)
        return node

    return jax.tree.map(set_on, tree, is_leaf=lambda node: type(node) is kind)
