"""Which sparsity type each leaf has: one for all, an ordered mapping from names, or a function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import SparsityType

SparsityTypeSetting = SparsityType | Mapping[Any, Any] | Callable[[tree_lib.Path, Any], Any]


def normalize_setting(setting: Any) -> Any:
    """Checks a `sparsity_type` setting and reads the strings in it.

    Args:
      setting: a type, a string, a mapping from leaf names to types (or strings, or `None` for dense), or a function
        `(path, leaf) -> type or None`.

    Returns:
      The same with every string replaced by the type it names.

    Raises:
      TypeError: the setting is none of these.

    >>> normalize_setting({'*/head/*': None, '*': '2:4'})
    {'*/head/*': None, '*': NByM(n=2, m=4, axis=-1)}
    """
    if setting is None:
        return sparsity_types.Unstructured()
    if isinstance(setting, Mapping):
        return {name: None if entry is None else _one_type(entry) for name, entry in setting.items()}
    if callable(setting) and not isinstance(setting, type | SparsityType):
        return setting
    return _one_type(setting)


def _one_type(entry: Any) -> SparsityType:
    if isinstance(entry, str):
        return sparsity_types.parse_sparsity_type(entry)
    if isinstance(entry, SparsityType) and not isinstance(entry, type):
        return entry
    hint = f'; write {entry.__name__}(…)' if isinstance(entry, type) else ''
    raise TypeError(
        f'{entry!r} is no sparsity type{hint}; use Unstructured(), NByM, Block, Channel, or a string like "2:4"'
    )


def resolve(
    setting: SparsityTypeSetting, paths: Sequence[tree_lib.Path], leaves: Sequence[Any]
) -> list[SparsityType | None]:
    """The sparsity type of each leaf.

    Args:
      setting: a normalized `sparsity_type` setting.
      paths: the leaves' paths.
      leaves: the leaves; a function setting gets them.

    Returns:
      A type for each leaf, `None` where it is dense. In a mapping the first name that matches wins, and a leaf that no
      name matches is unstructured.

    Raises:
      ValueError: a name in the mapping matches no leaf.

    >>> resolve({'*/bias': None, '*': sparsity_types.NByM(1, 2)}, [('a', 'bias'), ('a', 'kernel')], [0, 0])
    [None, NByM(n=1, m=2, axis=-1)]
    """
    if isinstance(setting, Mapping):
        tree_lib.check_names(setting, paths, 'sparsity_type')
        default = {'*': sparsity_types.Unstructured()}
        rules = list(setting.items()) + list(default.items())
        return [next(entry for name, entry in rules if name == '*' or tree_lib.matches(name, path)) for path in paths]
    if isinstance(setting, SparsityType):
        return [setting] * len(paths)
    chosen = [setting(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return [None if entry is None else _one_type(entry) for entry in chosen]
