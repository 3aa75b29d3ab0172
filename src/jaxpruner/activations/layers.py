"""Which layers of a model a setting means: names and globs, classes, functions, predicates.

A layer is known by its path, `'encoder/Dense_0'`; a method other than `__call__` by `'encoder/Embed_0.attend'`.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib

# How many layers an error lists.
_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model, or one of its methods."""

    path: tree_lib.Path  # names from the model down to the layer; empty for the model itself
    value: Any  # the module, or the function that is one of a module's fields
    method: str = '__call__'  # that is called
    is_function: bool = False  # the value is a function, not a module

    @property
    def name(self) -> str:
        """The name in reports and messages; the model itself goes by the name of its class."""
        name = tree_lib.path_string(self.path) or type(self.value).__name__
        return name if self.method == '__call__' else f'{name}.{self.method}'


def read_where(where: Any) -> tuple[Any, ...]:
    """The entries of a setting that names layers, each a name or glob, a class, a function, or a predicate.

    Raises:
      TypeError: an entry is none of these.
      ValueError: there is no entry.
    """
    entries = tuple(where) if isinstance(where, list | tuple | set | frozenset) else (where,)
    if not entries:
        raise ValueError("where names no layer; '*' means every one")
    for entry in entries:
        if not isinstance(entry, str | type) and not callable(entry):
            raise TypeError(
                "where must be a name or glob such as 'Dense_*', a class, a function (name, layer) -> bool, or a list "
                f'of those, got {entry!r}'
            )
    return entries


def means_layer(entry: Any, layer: Layer) -> bool:
    """Whether an entry of `where` means a layer.

    Only its class means the model itself. Only a name means a method other than `__call__`. Only a name whose last part
    is written out means a function. Raises TypeError where the entry is a function that does not take `(name, layer)`
    or returns no bool.

    >>> layer = Layer(('encoder', 'Dense_0'), None)
    >>> means_layer('*/Dense_0', layer), means_layer('encoder-*', layer), means_layer('Dense_0', layer)
    (True, True, False)
    """
    if isinstance(entry, str):
        return _is_named(entry, layer)
    if layer.is_function or layer.method != '__call__':
        return False
    if isinstance(entry, type):
        return isinstance(layer.value, entry)
    return bool(layer.path) and _predicate_holds(entry, layer)


def choose_paths(entries: Sequence[Any], layers: Sequence[Layer]) -> set[tree_lib.Path]:
    """The paths of the layers (and functions in fields) that entries mean; ValueError if one means none."""
    paths: set[tree_lib.Path] = set()
    for entry in entries:
        chosen = [layer for layer in layers if _is_object(layer.value, entry)]
        if not chosen:
            chosen = [layer for layer in layers if means_layer(entry, layer)]
        if not chosen:
            modules = [layer.name for layer in layers if layer.path and not layer.is_function]
            listed = _listed(entry, modules, 'they are', 'model')
            raise ValueError(f'where: {entry!r} matches no layer of the model; {listed}')
        paths.update(layer.path for layer in chosen)
    return paths


def refuse_call(entries: Sequence[Any], called: Iterable[str], framework: str) -> None:
    """Raises the ValueError at the end of a call in which `entries` meant none of the layers that were called."""
    names = ', '.join(map(repr, entries))
    listed = _listed(entries[0], list(called), 'these were:', framework)
    raise ValueError(f'where: {names} matches no layer that was called; {listed}')


def _is_object(value: Any, entry: Any) -> bool:
    """Whether a value is the object that an entry is, or wraps it."""
    while value is not None and value is not entry:
        value = getattr(value, '__wrapped__', None)
    return value is not None


def _is_named(pattern: str, layer: Layer) -> bool:
    stem = pattern
    if layer.method != '__call__':
        stem, _, method = pattern.rpartition('.')
        if method != layer.method:
            return False
    # Layers hold functions that a glob does not mean: initialisers, dot_general, …
    last_name = pattern.replace('-', '/').rpartition('/')[2]
    if layer.is_function and not set(last_name).isdisjoint('*?['):
        return False
    names = ['/'.join(layer.path), '-'.join(layer.path)]
    return bool(layer.path) and any(tree_lib.matches(stem, (name,)) for name in names)


def _predicate_holds(predicate: Callable[..., Any], layer: Layer) -> bool:
    try:
        inspect.signature(predicate).bind(layer.name, layer.value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f'where: {predicate!r} is no function among the fields of the model, nor does it take (name, layer)'
        ) from error
    holds = predicate(layer.name, layer.value)
    if not isinstance(holds, bool | np.bool_):
        raise TypeError(
            f'where: {predicate!r} must say True or False of a layer, got {holds!r} for {layer.name!r}'
        )
    return bool(holds)


def _listed(entry: Any, names: Sequence[str], words: str, framework: str) -> str:
    """The layers that there are, those whose names look most like the entry first."""
    if not names and framework in ('function', 'haiku'):
        return (
            'there was none: only layers of flax.linen and Haiku are seen in a function, and one that is the whole '
            'model is meant by its class alone; give an nnx or Equinox model as it is'
        )
    if not names:
        return (
            'there is none in it; a glob or a function never means the model itself: name its class'
        )
    text = entry if isinstance(entry, str) else getattr(entry, '__name__', '')

    def distance(name: str) -> float:
        return -difflib.SequenceMatcher(None, text, name).ratio()

    nearest_first = sorted(dict.fromkeys(names), key=distance)
    more = ', …' if len(nearest_first) > _LISTED else ''
    return f'{words} {", ".join(map(repr, nearest_first[:_LISTED]))}{more}'
