"""Which layers of a model a setting means: names and globs, classes, functions, predicates.

A layer is known by its path, `'encoder/Dense_0'`; a method other than `__call__` by `'encoder/Embed_0.attend'`.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxpruner.core import tree as tree_lib

# How many layers an error lists.
_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model, or one of its methods.

    Attributes:
      path: names from the model down to the layer; empty for the model itself.
      value: the module, or the function that is one of a module's fields.
      method: the method that is called.
      is_function: the value is a function, not a module.

    >>> Layer(('encoder', 'Embed_0'), None, 'attend').name
    'encoder/Embed_0.attend'
    """

    path: tree_lib.Path
    value: Any
    method: str = '__call__'
    is_function: bool = False

    @property
    def name(self) -> str:
        """The name in reports and messages; the model itself goes by the name of its class."""
        name = tree_lib.path_string(self.path) or type(self.value).__name__
        return name if self.method == '__call__' else f'{name}.{self.method}'


def read_where(where: Any) -> tuple[Any, ...]:
    """Reads a setting that names layers.

    Args:
      where: a name or glob, a class, a function, a predicate `(name, layer) -> bool`, or a list of those.

    Returns:
      Its entries.

    Raises:
      TypeError: an entry is none of these.
      ValueError: there is no entry.

    >>> read_where('Dense_*')
    ('Dense_*',)
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


def chosen(entry: Any, layer: Layer) -> bool:
    """Whether an entry of `where` means a layer.

    The model itself is meant by its class alone; methods other than `__call__` and functions by name alone, functions
    with the last part of the name written out.

    Args:
      entry: one of `read_where`'s.
      layer: the layer.

    Raises:
      TypeError: the entry is a function that does not take `(name, layer)` or returns no bool.

    >>> layer = Layer(('encoder', 'Dense_0'), None)
    >>> chosen('*/Dense_0', layer), chosen('encoder-*', layer), chosen('Dense_0', layer)
    (True, True, False)
    """
    if isinstance(entry, str):
        return _is_named(entry, layer)
    if layer.is_function or layer.method != '__call__':
        return False
    if isinstance(entry, type):
        return isinstance(layer.value, entry)
    return bool(layer.path) and _predicate_holds(entry, layer)


def choose(entries: Sequence[Any], layers: Sequence[Layer]) -> set[tree_lib.Path]:
    """The paths of the layers that are meant, among all layers of a model.

    Args:
      entries: what `read_where` returned.
      layers: all layers, and the functions that are fields of layers.

    Raises:
      ValueError: an entry means no layer.

    >>> choose(['Dense_*'], [Layer(('Dense_0',), None), Layer(('Conv_0',), None)])
    {('Dense_0',)}
    """
    paths: set[tree_lib.Path] = set()
    for entry in entries:
        found = {layer.path for layer in layers if _is(layer.value, entry)}
        found = found or {layer.path for layer in layers if chosen(entry, layer)}
        if not found:
            modules = [layer.name for layer in layers if layer.path and not layer.is_function]
            listed = _listed(entry, modules, 'they are', 'model')
            raise ValueError(f'where: {entry!r} matches no layer of the model; {listed}')
        paths |= found
    return paths


def refuse_call(entries: Sequence[Any], called: Iterable[str], kind: str) -> None:
    """Refuses the end of a call in which entries meant no layer.

    Args:
      entries: those of `read_where`'s that meant none.
      called: the names of the layers that were called.
      kind: the kind of model that was called, as `models.kind_of` names it.

    Raises:
      ValueError: always.

    >>> refuse_call(['Dense_1'], ['Conv_0', 'Dense_0'], 'linen')
    Traceback (most recent call last):
    ValueError: where: 'Dense_1' matches no layer that was called; these were: 'Dense_0', 'Conv_0'
    """
    names = ', '.join(map(repr, entries))
    listed = _listed(entries[0], list(called), 'these were:', kind)
    raise ValueError(f'where: {names} matches no layer that was called; {listed}')


def _is(value: Any, entry: Any) -> bool:
    """Whether a value is the object that is meant, or was made to stand in its place."""
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
    if layer.is_function and any(
        character in '*?[' for character in pattern.replace('-', '/').rpartition('/')[2]
    ):
        return False
    return bool(layer.path) and any(
        tree_lib.matches(stem, (sign.join(layer.path),)) for sign in '/-'
    )


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


def _listed(entry: Any, names: Sequence[str], words: str, kind: str) -> str:
    """The layers that there are, the nearest first."""
    if not names and kind in ('function', 'haiku'):
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

    near = sorted(dict.fromkeys(names), key=distance)
    return f'{words} {", ".join(map(repr, near[:_LISTED]))}' + (
        ', …' if len(near) > _LISTED else ''
    )
