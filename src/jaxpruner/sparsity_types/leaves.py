"""What is known of each leaf before its masks are made, and the setting that says which sparsity type it has."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types.base import GroupedType, Groups, SparsityType, Unstructured, is_joint
from jaxpruner.sparsity_types.n_by_m import NByM, PartialGroupError
from jaxpruner.sparsity_types.parsing import parse_sparsity_type

# One type for all leaves, an ordered mapping from names to types, or a function `(path, leaf) -> type`.
SparsityTypeSetting = SparsityType | Mapping[Any, Any] | Callable[[tree_lib.Path, Any], Any]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a model.

    Attributes:
      path: the leaf's.
      shape: its shape, with the axis of layers where it is stacked.
      dtype: of its elements; `None` where there is no array.
      sparsity_type: which of its weights are removed together; `None` where it is dense.
      layer_axis: the axis that counts layers, each of which is ranked on its own; `None` where there is none.
      target: the share to remove in the end; `None` where it has no target, or where that is being traced.
    """

    path: tree_lib.Path
    shape: tuple[int, ...]
    dtype: Any
    sparsity_type: SparsityType | None
    layer_axis: int | None
    target: float | None

    @property
    def name(self) -> str:
        """The path as text."""
        return tree_lib.path_string(self.path)

    @property
    def groups(self) -> Groups:
        """The groups of the leaf's weights, where the axis of layers comes first."""
        return Groups(self.sparsity_type, self.is_stacked)

    @property
    def is_stacked(self) -> bool:
        """Whether the leaf is a stack of layers."""
        return self.layer_axis is not None

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of what is ranked on its own."""
        return tree_lib.layer_shape(self.shape, self.layer_axis)

    def layers_first(self, array: Any) -> Any:
        """Moves the axis of layers to the front, as `groups` expects it, of an array or of lazy scores."""
        if not (axis := self.layer_axis):
            return array
        return jax.tree.map(lambda part: jnp.moveaxis(part, axis, 0), array)

    def layers_back(self, array: jax.Array) -> jax.Array:
        """Moves the axis of layers back."""
        return jnp.moveaxis(array, 0, self.layer_axis) if self.layer_axis else array

    def check_shape(self) -> None:
        """Raises `ValueError` if the sparsity type does not fit the shape."""
        if self.sparsity_type is not None:
            self.sparsity_type.check_shape(self.layer_shape, self.name)


def leaf_of(
    path: tree_lib.Path,
    array: Any,
    sparsity_type: SparsityType | None,
    layer_axis: int | None,
) -> Leaf:
    """Describes a leaf by its array, or by its shape; it has no target yet."""
    shape = tuple(getattr(array, 'shape', ()))
    dtype = getattr(array, 'dtype', None)
    return Leaf(path, shape, dtype, sparsity_type, layer_axis, target=None)


def resolve_leaves(
    paths: Sequence[tree_lib.Path],
    arrays: Sequence[Any],
    types: Sequence[SparsityType | None],
    stacked: tree_lib.Stacked,
) -> list[Leaf]:
    """Describes all leaves of a model, given the sparsity type of each and the names of stacked ones."""
    leaves = []
    for i, path in enumerate(paths):
        shape = getattr(arrays[i], 'shape', None)
        axis = None if shape is None else tree_lib.layer_axis(stacked, path, shape)
        leaves.append(leaf_of(path, arrays[i], types[i], axis))
    return leaves


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
        entry = parse_sparsity_type(entry)
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


def resolve_types(
    setting: SparsityTypeSetting, paths: Sequence[tree_lib.Path], leaves: Sequence[Any]
) -> list[SparsityType | None]:
    """Finds the sparsity type of each leaf by a normalized setting, `None` where it is dense.

    In a mapping the first name that matches wins, and a leaf that no name matches is unstructured. A function gets
    paths and leaves.

    Raises:
      ValueError: a name in the mapping matches no leaf, or only leaves that earlier names take.

    >>> resolve_types({'*/bias': None, '*': NByM(1, 2)}, [('a', 'bias'), ('a', 'kernel')], [0, 0])
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


def check_groups(
    checks: Mapping[tree_lib.Path, Callable[[], object]],
    setting: SparsityTypeSetting,
    paths: Sequence[tree_lib.Path],
) -> None:
    """Refuses all leaves that cannot take N:M in one error, with the whole setting that leaves them dense.

    Args:
      checks: for each leaf a function that raises a `PartialGroupError` if it cannot.
      setting: the normalized setting of which they have their types.
      paths: of all leaves of the model.

    >>> check = lambda: NByM(2, 4).check_shape((3, 3), 'a')
    >>> check_groups({('a',): check}, NByM(2, 4), [('a',), ('b',)])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a: shape (3, 3) ... not divide. ... leave them dense: sparsity_type={'a': None, '*': '2:4'}
    """
    refused = {}
    for path, check in checks.items():
        try:
            check()
        except PartialGroupError as error:
            refused[path] = error
    if not refused:
        return
    reasons = '; '.join(str(error).partition('; ')[0] for error in refused.values())
    if callable(setting) and not isinstance(setting, SparsityType):
        dense = 'by a sparsity_type that returns None for them'
    else:
        rules = {tree_lib.path_string(path): 'None' for path in refused}
        left = [path for path in paths if path not in refused]
        for name, entry in (setting if isinstance(setting, Mapping) else {'*': setting}).items():
            # A rule without a leaf is an error.
            if any(tree_lib.matches(name, path) for path in left):
                rules[name] = _as_written(entry)
                left = [path for path in left if not tree_lib.matches(name, path)]
        texts = [f'{name!r}: {entry}' for name, entry in rules.items()]
        dense = f'sparsity_type={{{", ".join(texts)}}}'
    raise ValueError(
        f'{reasons}. Choose another m or axis for such leaves, or leave them dense: {dense}'
    )


def _as_written(entry: SparsityType | None) -> str:
    """Writes a type as users write it in a setting."""
    if isinstance(entry, NByM) and isinstance(entry.axis, int) and not entry.allow_partial:
        axis = '' if entry.axis == -1 else f',{entry.axis}'
        return repr(f'nm_{entry.n},{entry.m}{axis}' if axis else f'{entry.n}:{entry.m}')
    return repr('unstructured') if type(entry) is Unstructured else repr(entry)
