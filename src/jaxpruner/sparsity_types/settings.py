"""Which sparsity type each leaf has: one for all, an ordered mapping from names, or a function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_types.base import GroupedType, SparsityType
from jaxpruner.sparsity_types.joint import is_joint
from jaxpruner.sparsity_types.n_by_m import NByM
from jaxpruner.sparsity_types.parsing import parse_sparsity_type
from jaxpruner.sparsity_types.unstructured import Unstructured

SparsityTypeSetting = SparsityType | Mapping[Any, Any] | Callable[[tree_lib.Path, Any], Any]


def normalize_setting(setting: Any) -> Any:
    """Checks a `sparsity_type` setting and replaces every string in it by the type that it names.

    A setting is a type, a string, a mapping (or a list of pairs) from leaf names to types (or strings; `None` or
    `'dense'` for dense), or a function `(path, leaf) -> type or None`.

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
        return Unstructured()
    if isinstance(setting, list | tuple):
        _check_pairs(setting)
        return _read_rules(setting)
    if isinstance(setting, Mapping):
        return _read_rules(list(setting.items()))
    if callable(setting) and not isinstance(setting, type | SparsityType):
        return setting
    return _read_type(setting)


def _read_type(entry: Any) -> SparsityType:
    if isinstance(entry, str):
        return parse_sparsity_type(entry)
    if entry is Unstructured:
        return Unstructured()
    usable = isinstance(entry, NByM | GroupedType) and not isinstance(entry, type)
    if not (usable or is_joint(entry)):
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
        rules[tree_lib.rule_name(name)] = None if is_dense else _read_type(entry)
    return rules


def resolve(
    setting: SparsityTypeSetting, paths: Sequence[tree_lib.Path], leaves: Sequence[Any]
) -> list[SparsityType | None]:
    """The sparsity type of each leaf by a normalized setting, `None` where it is dense.

    In a mapping the first name that matches wins, and a leaf that no name matches is unstructured. A function gets
    paths and leaves.

    Raises:
      ValueError: a name in the mapping matches no leaf, or only leaves that earlier names take.

    >>> resolve({'*/bias': None, '*': NByM(1, 2)}, [('a', 'bias'), ('a', 'kernel')], [0, 0])
    [None, NByM(n=1, m=2, axis=-1, allow_partial=False)]
    """
    if isinstance(setting, SparsityType):
        return [setting] * len(paths)
    types: list[SparsityType | None] = []
    if isinstance(setting, Mapping):
        named = list(setting.values())
        for rule in tree_lib.first_matches(setting, paths, 'sparsity_type'):
            types.append(Unstructured() if rule is None else named[rule])
        return types
    for path, leaf in zip(paths, leaves, strict=True):
        entry = setting(path, leaf)
        types.append(None if entry is None else _read_type(entry))
    return types
