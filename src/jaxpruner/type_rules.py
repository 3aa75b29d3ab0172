"""Which sparsity type each leaf has: one for all, an ordered mapping from names, or a function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner import sparsity_types
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_types import SparsityType

SparsityTypeSetting = SparsityType | Mapping[Any, Any] | Callable[[tree_lib.Path, Any], Any]


def normalize_setting(setting: Any) -> Any:
    """Checks a `sparsity_type` setting and reads the strings in it.

    Args:
      setting: a type, a string, a mapping (or a list of pairs) from leaf names to types (or strings; `None` or
        `'dense'` for dense), or a function `(path, leaf) -> type or None`.

    Returns:
      The same with every string replaced by the type it names.

    Raises:
      TypeError, ValueError: the setting is none of these.

    >>> normalize_setting({'*/head/*': None, '*': '2:4'})
    {'*/head/*': None, '*': NByM(n=2, m=4, axis=-1, allow_partial=False)}
    """
    try:
        return _normalized(setting)
    except (TypeError, ValueError) as error:
        refusal = TypeError if isinstance(error, TypeError) else ValueError
        raise refusal(f'sparsity_type={setting!r}: {error}') from None


def _normalized(setting: Any) -> Any:
    if setting is None:
        return sparsity_types.Unstructured()
    if isinstance(setting, list | tuple):
        _check_pairs(setting)
        return _read_rules(setting)
    if isinstance(setting, Mapping):
        return _read_rules(list(setting.items()))
    if callable(setting) and not isinstance(setting, type | SparsityType):
        return setting
    return _one_type(setting)


def _one_type(entry: Any) -> SparsityType:
    if isinstance(entry, str):
        return sparsity_types.parse_sparsity_type(entry)
    if entry is sparsity_types.Unstructured:
        return sparsity_types.Unstructured()
    usable = isinstance(entry, sparsity_types.NByM | sparsity_types.GroupedType) and not isinstance(
        entry, type
    )
    if not usable:
        hint = f'; write {entry.__name__}(…)' if isinstance(entry, type) else ''
        raise TypeError(
            f'{entry!r} is no sparsity type{hint}; use Unstructured(), NByM, Block, Channel, a string like "2:4", or '
            'an object with the methods of sparsity_types.GroupedType'
        )
    try:
        hash(entry)
    except TypeError:
        raise TypeError(
            f'the sparsity type {entry!r} must be hashable; make its dataclass frozen'
        ) from None
    return entry


def _check_pairs(pairs: Sequence[Any]) -> None:
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(
                f"a list holds pairs of name and type, such as ['head/*', '2:4'], got {pair!r}"
            )


def _read_rules(pairs: Sequence[Any]) -> dict[Any, Any]:
    if not pairs:
        raise ValueError("it has no rule; write {'*': '2:4'} for all leaves, or leave it out")
    rules = {}
    for name, entry in pairs:
        is_dense = entry is None or (isinstance(entry, str) and entry == 'dense')
        rules[tree_lib.rule_name(name)] = None if is_dense else _one_type(entry)
    return rules


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
      ValueError: a name in the mapping matches no leaf, or only leaves that earlier names take.

    >>> resolve({'*/bias': None, '*': sparsity_types.NByM(1, 2)}, [('a', 'bias'), ('a', 'kernel')], [0, 0])
    [None, NByM(n=1, m=2, axis=-1, allow_partial=False)]
    """
    if isinstance(setting, Mapping):
        types = list(setting.values())
        chosen = tree_lib.first_matches(setting, paths, 'sparsity_type')
        return [sparsity_types.Unstructured() if rule is None else types[rule] for rule in chosen]
    if isinstance(setting, SparsityType):
        return [setting] * len(paths)
    chosen = [setting(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return [None if entry is None else _one_type(entry) for entry in chosen]
