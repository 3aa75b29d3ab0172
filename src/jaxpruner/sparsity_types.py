"""Which sets of weights are removed together: single weights, N of M, blocks, channels.

Strings are read once, by `parse_sparsity_type`; array code sees only the validated objects.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner import tree as tree_lib


def _check_whole(name: str, value: Any, minimum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f'{name} must be a whole number, got {value!r}')
    if minimum is not None and value < minimum:
        raise ValueError(f'{name} must be at least {minimum}, got {value}')


@dataclasses.dataclass(frozen=True)
class Unstructured:
    """Every weight stands alone. Config string: `'unstructured'`.

    >>> Unstructured()
    Unstructured()
    """

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape.

        >>> Unstructured().check_shape((3, 5), 'kernel')
        """


@dataclasses.dataclass(frozen=True)
class NByM:
    """Of each `m` consecutive weights along `axis`, the best `n` are kept. Config strings: `'nm_2,4'`, `'2:4'`.

    Attributes:
      n: weights kept in a group.
      m: weights in a group.
      axis: the axis along which groups lie.

    Raises:
      ValueError: n > m, or one of them is not positive.
      TypeError: a value is no whole number.

    >>> NByM(2, 4)
    NByM(n=2, m=4, axis=-1)
    """

    n: int
    m: int
    axis: int = -1

    def __post_init__(self):
        _check_whole('n', self.n, 1)
        _check_whole('m', self.m, 1)
        _check_whole('axis', self.axis)
        if self.n > self.m:
            raise ValueError(f'N:M sparsity keeps n of m weights, so n must not exceed m, got n={self.n}, m={self.m}')

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape whose axis does not divide into groups of m.

        Args:
          shape: the parameter's shape.
          where: the parameter's path, for the message.

        Raises:
          ValueError: there is no such axis, or m does not divide it.

        >>> NByM(2, 4).check_shape((3, 8), 'dense/kernel')
        """
        length = shape[_axis_in(self.axis, shape, where)]
        if length % self.m:
            raise ValueError(
                f'{where}: shape {tuple(shape)} has length {length} along axis {self.axis}, which m={self.m} does not '
                f"divide; choose another axis or m, or leave the leaf dense: sparsity_type={{'{where}': None, '*': …}}"
            )


@dataclasses.dataclass(frozen=True)
class Block:
    """Blocks over the last two axes are kept or removed whole. Config string: `'block_4,4'`.

    Attributes:
      block_shape: height and width of a block.
      use_avg_pooling: a block's score is the mean of its scores, else their maximum.

    Raises:
      ValueError: not two positive lengths.

    >>> Block((4, 4))
    Block(block_shape=(4, 4), use_avg_pooling=True)
    """

    block_shape: tuple[int, int]
    use_avg_pooling: bool = True

    def __post_init__(self):
        if (
            not isinstance(self.block_shape, Sequence)
            or isinstance(self.block_shape, str)
            or len(self.block_shape) != 2
        ):
            raise ValueError(f'block_shape must be (height, width), got {self.block_shape!r}')
        # A list from a config file becomes hashable.
        object.__setattr__(self, 'block_shape', tuple(self.block_shape))
        for name, length in zip(('block height', 'block width'), self.block_shape, strict=True):
            _check_whole(name, length, 1)

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape: blocks at the edges may be partial, a 1-D array is one row.

        >>> Block((4, 4)).check_shape((3, 3), 'kernel')
        """


@dataclasses.dataclass(frozen=True)
class Channel:
    """All weights with the same index along `axis` are kept or removed together. Config string: `'channel_-1'`.

    Attributes:
      axis: the channels' axis.

    Raises:
      TypeError: the axis is no whole number.

    >>> Channel()
    Channel(axis=-1)
    """

    axis: int = -1

    def __post_init__(self):
        _check_whole('axis', self.axis)

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape without the axis.

        Raises:
          ValueError: there is no such axis.

        >>> Channel(1).check_shape((3, 8), 'dense/kernel')
        """
        _axis_in(self.axis, shape, where)


def _axis_in(axis: int, shape: Sequence[int], where: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f'{where}: axis {axis} does not exist in shape {tuple(shape)}; use one in [{-len(shape)}, {len(shape)})'
        )
    return axis


SparsityType = Unstructured | NByM | Block | Channel
_SPARSITY_TYPES = (Unstructured, NByM, Block, Channel)
# One type for all leaves, an ordered mapping from leaf names to types, or a function of path and leaf.
SparsityTypeSetting = SparsityType | Mapping[Any, Any] | Callable[[tree_lib.Path, Any], Any]

_INTEGER = r'\s*([+-]?\d+)\s*'
_PATTERNS: tuple[tuple[str, Callable[..., SparsityType]], ...] = (
    (r'\s*unstructured\s*', Unstructured),
    (rf'{_INTEGER}:{_INTEGER}', NByM),
    (rf'\s*nm_{_INTEGER},{_INTEGER}', NByM),
    (rf'\s*nm_{_INTEGER},{_INTEGER},{_INTEGER}', NByM),
    (rf'\s*block_{_INTEGER},{_INTEGER}', lambda height, width: Block((height, width))),
    (rf'\s*channel_{_INTEGER}', Channel),
)


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a sparsity type as it stands in configs.

    Args:
      text: `'unstructured'`, `'nm_2,4'`, `'nm_2,4,0'` (with the axis), `'2:4'`, `'block_4,4'` or `'channel_-1'`.

    Returns:
      The validated type.

    Raises:
      ValueError: the text is none of these.

    >>> parse_sparsity_type('2:4') == parse_sparsity_type('nm_2,4') == NByM(2, 4)
    True
    """
    for pattern, make in _PATTERNS:
        if found := re.fullmatch(pattern, text):
            return make(*map(int, found.groups()))
    raise ValueError(
        f"unknown sparsity type {text!r}; write 'unstructured', 'nm_2,4' or '2:4', 'block_4,4', or 'channel_-1'"
    )


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
        return Unstructured()
    if isinstance(setting, Mapping):
        return {name: None if entry is None else _one_type(entry) for name, entry in setting.items()}
    if callable(setting) and not isinstance(setting, type):
        return setting
    return _one_type(setting)


def _one_type(entry: Any) -> SparsityType:
    if isinstance(entry, str):
        return parse_sparsity_type(entry)
    if isinstance(entry, _SPARSITY_TYPES):
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

    >>> resolve({'*/bias': None, '*': NByM(1, 2)}, [('a', 'bias'), ('a', 'kernel')], [0, 0])
    [None, NByM(n=1, m=2, axis=-1)]
    """
    if isinstance(setting, Mapping):
        tree_lib.check_names(setting, paths, 'sparsity_type')
        default = {'*': Unstructured()}
        rules = list(setting.items()) + list(default.items())
        return [next(entry for name, entry in rules if name == '*' or tree_lib.matches(name, path)) for path in paths]
    if isinstance(setting, _SPARSITY_TYPES):
        return [setting] * len(paths)
    chosen = [setting(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return [None if entry is None else _one_type(entry) for entry in chosen]
