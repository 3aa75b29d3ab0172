"""Which sets of weights are removed together: single weights, N of M, blocks, channels.

A type that pools scores over groups of weights and spreads the groups' verdicts back is all that is needed: counting
and selecting is the same for all (`mask_calculator`). N:M ranks inside its groups instead. Strings are read once, by
`parse_sparsity_type`; array code sees only the validated objects. `register_sparsity_type` adds strings of one's own.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib

# The axis along which a model sums, in whatever layout its framework has.
INPUT_AXIS = 'input'


@runtime_checkable
class SparsityType(Protocol):
    """What every sparsity type has: it is hashable and checks the shapes that it is used for.

    >>> isinstance(Channel(), SparsityType)
    True
    """

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Raises `ValueError` with the parameter's path `where` if the type does not fit the shape."""


@runtime_checkable
class GroupedType(SparsityType, Protocol):
    """A type whose groups of weights are kept or removed whole, ranked over the leaf.

    >>> isinstance(Channel(), GroupedType), isinstance(NByM(2, 4), GroupedType)
    (True, False)
    """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Pools the scores of a leaf into an array with one score for each group."""
        ...

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each weight of a leaf of this shape the verdict of its group."""
        ...


class _NamedFields:
    """Gives a frozen dataclass the methods of a named tuple, as the sparsity types of JaxPruner were.

    It is no tuple: JAX keeps it whole as a leaf of a pytree, and `NByM(1, 2)` is not equal to `Block((1, 2))`.
    `_fields` names what unpacking gives, in order; other fields have defaults.
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._fields])

    def __len__(self) -> int:
        return len(self._fields)

    def __bool__(self) -> bool:
        return True  # a type without fields is a type, too

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def _asdict(self):
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes):
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    @classmethod
    def _make(cls, values):
        return cls(*values)


def _check_whole(name, value, minimum=None):
    if isinstance(value, bool) or not hasattr(value, '__index__'):
        raise TypeError(f'{name} must be a whole number, got {value!r}')
    if minimum is not None and value < minimum:
        raise ValueError(f'{name} must be at least {minimum}, got {value}')


@dataclasses.dataclass(frozen=True)
class Unstructured(_NamedFields):
    """Every weight stands alone. Config string: `'unstructured'`.

    >>> Unstructured()
    Unstructured()
    """

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape.

        >>> Unstructured().check_shape((3, 5), 'kernel')
        """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Returns the scores: each weight is a group."""
        return scores

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the mask as it is."""
        del shape
        return group_mask


@dataclasses.dataclass(frozen=True)
class Block(_NamedFields):
    """Blocks over the last two axes are kept or removed whole. Config string: `'block_4,4'`.

    Attributes:
      block_shape: height and width of a block.
      use_avg_pooling: a block's score is the mean of its scores, else their maximum.

    Raises:
      ValueError: not two positive lengths.

    >>> Block((4, 4))
    Block(block_shape=(4, 4), use_avg_pooling=True)
    """

    _fields = ('block_shape', 'use_avg_pooling')

    block_shape: tuple[int, int]
    use_avg_pooling: bool = True

    def __post_init__(self):
        lengths = self.block_shape
        if not isinstance(lengths, list | tuple) or len(lengths) != 2:
            raise ValueError(f'block_shape must be (height, width), got {lengths!r}')
        _check_whole('block height', lengths[0], 1)
        _check_whole('block width', lengths[1], 1)
        # A list from a config file becomes hashable.
        object.__setattr__(self, 'block_shape', tuple(lengths))

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape: blocks at the edges may be partial, a 1-D array is one row.

        >>> Block((4, 4)).check_shape((3, 3), 'kernel')
        """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Computes means or maxima of the blocks, in one array with the blocks' rows and columns as its last axes.

        >>> Block((1, 2)).group_scores(jnp.array([[1.0, 3.0, 5.0]]))
        Array([[2., 5.]], dtype=float32)
        """
        # Sums of 16-bit scores would lose what tells blocks apart, and some floats of 8 bits have no infinity.
        dtype = tree_lib.at_least_float32(scores.dtype)
        filler = 0 if self.use_avg_pooling else -jnp.inf
        pooled, sizes = scores.astype(dtype), np.ones((), dtype)
        for axis, length in self._axes(scores.ndim):
            size, before, after = scores.shape[axis], pooled.shape[:axis], pooled.shape[axis + 1 :]
            padding = [(0, 0)] * axis + [(0, -size % length)] + [(0, 0)] * len(after)
            padded = jnp.pad(pooled, padding, constant_values=filler)
            split = padded.reshape(*before, -(-size // length), length, *after)
            pooled = split.sum(axis + 1) if self.use_avg_pooling else split.max(axis + 1)
            lengths = np.minimum(length, np.arange(size, 0, -length)).astype(dtype)
            sizes = sizes * lengths.reshape(-1, *[1] * len(after))
        return pooled / sizes if self.use_avg_pooling else pooled

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each block's verdict to all of its weights.

        >>> Block((1, 2)).spread_groups(jnp.array([[1, 0]], jnp.uint8), (1, 3))
        Array([[1, 1, 0]], dtype=uint8)
        """
        for axis, length in self._axes(len(shape)):
            # Broadcast, not jnp.repeat, which looks the verdicts up and gathers those of all devices for it.
            before, blocks = group_mask.shape[:axis], group_mask.shape[axis]
            after = group_mask.shape[axis + 1 :]
            verdicts = jnp.expand_dims(group_mask, axis + 1)
            spread = jnp.broadcast_to(verdicts, (*before, blocks, length, *after))
            padded = spread.reshape(*before, blocks * length, *after)
            group_mask = jax.lax.slice_in_dim(padded, 0, shape[axis], axis=axis)
        return group_mask

    def _axes(self, rank):
        """Lists axis and block length for each blocked axis: none of a scalar, one of a vector."""
        height, width = self.block_shape
        return [(rank - 2, height), (rank - 1, width)][-rank:] if rank else []


@dataclasses.dataclass(frozen=True)
class Channel(_NamedFields):
    """All weights with the same index along `axis` are kept or removed together. Config string: `'channel_-1'`.

    Attributes:
      axis: the channels' axis.

    Raises:
      TypeError: the axis is no whole number.

    >>> Channel()
    Channel(axis=-1)
    """

    _fields = ('axis',)

    axis: int = -1

    def __post_init__(self):
        _check_whole('axis', self.axis)

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape without the axis.

        Raises:
          ValueError: there is no such axis.

        >>> Channel(1).check_shape((3, 8), 'dense/kernel')
        """
        tree_lib.check_axis(self.axis, shape, where)

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Sums over all other axes: one score for each channel.

        >>> Channel(-1).group_scores(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        Array([4., 6.], dtype=float32)
        """
        # Sums of 16-bit scores would overflow.
        dtype = tree_lib.at_least_float32(scores.dtype)
        return jnp.sum(scores.astype(dtype), axis=self._others(scores.ndim))

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each channel's verdict to all of its weights.

        >>> Channel(-1).spread_groups(jnp.array([0, 1], jnp.uint8), (2, 2))
        Array([[0, 1],
               [0, 1]], dtype=uint8)
        """
        return jnp.broadcast_to(jnp.expand_dims(group_mask, self._others(len(shape))), shape)

    def _others(self, rank):
        return tuple(axis for axis in range(rank) if axis != self.axis % rank)


@dataclasses.dataclass(frozen=True)
class NByM(_NamedFields):
    """Of each `m` consecutive weights along `axis`, the best `n` are kept. Config strings: `'nm_2,4'`, `'2:4'`.

    Attributes:
      n: weights kept in a group.
      m: weights in a group.
      axis: the axis along which groups lie; a tuple of axes, which are then one long axis, the last one innermost; or
        `'input'` for what the model sums over, which `uses.with_input_axes` replaces for each leaf.
      allow_partial: where m does not divide the axis, the last group is shorter and keeps min(n, its length); else
        such a shape is refused.

    Raises:
      ValueError: n > m, or one of them is not positive.
      TypeError: a value is no whole number.

    >>> NByM(2, 4)
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    >>> n, m, axis = NByM(2, 4)._replace(axis=0)
    >>> n, m, axis
    (2, 4, 0)
    """

    _fields = ('n', 'm', 'axis')  # those of JaxPruner, which its users unpack

    n: int
    m: int
    axis: Any = -1
    allow_partial: bool = False

    def __post_init__(self):
        _check_whole('n', self.n, 1)
        _check_whole('m', self.m, 1)
        if self.n > self.m:
            raise ValueError(f'n must not exceed m, got n={self.n}, m={self.m}')
        for axis in () if self.axis == INPUT_AXIS else self.axes:
            _check_whole('axis', axis)

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axis, or the axes, as a tuple."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def axis_words(self) -> str:
        """The axis in words, such as `axis -1`."""
        if isinstance(self.axis, tuple):
            return f'axes {", ".join(map(str, self.axis))} as one'
        return 'the inputs' if self.axis == INPUT_AXIS else f'axis {self.axis}'

    def line_length(self, shape: Sequence[int]) -> int:
        """Counts the weights of a line of a parameter of this shape; a line is cut into groups.

        Args:
          shape: the parameter's shape.

        >>> NByM(2, 4).line_length((4, 6, 8)), NByM(2, 4, axis=(0, 1)).line_length((4, 6, 8))
        (8, 24)
        """
        return math.prod(shape[axis] for axis in self.axes)

    def kept_of_shape(self, shape: Sequence[int]) -> int:
        """Counts the weights of a parameter of this shape that are kept.

        Args:
          shape: the parameter's shape.

        >>> NByM(2, 4).kept_of_shape((3, 8)), NByM(2, 4).kept_of_shape((3, 9))
        (12, 15)
        """
        length = self.line_length(shape)
        lines = math.prod(shape) // max(length, 1)
        return lines * (length // self.m * self.n + min(self.n, length % self.m))

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape whose axis does not divide into groups of m.

        Args:
          shape: the parameter's shape.
          where: the parameter's path, for the message.

        Raises:
          ValueError: there is no such axis, it is named twice, or m does not divide it.

        >>> NByM(2, 4).check_shape((3, 8), 'dense/kernel')
        """
        if self.partial_group(shape, where) and not self.allow_partial:
            raise ValueError(
                f'{where}: shape {tuple(shape)} has length {self.line_length(shape)} along {self.axis_words}, which '
                f'm={self.m} does not divide'
            )

    def partial_group(self, shape: Sequence[int], where: str) -> int:
        """Computes the length of the last group where m does not divide the axis, else 0.

        Args:
          shape: the parameter's shape.
          where: the parameter's path, for the message.

        Raises:
          ValueError: there is no such axis, or it is not known yet.

        >>> NByM(2, 4).partial_group((3, 10), 'dense/kernel')
        2
        """
        if self.axis == INPUT_AXIS:
            raise ValueError(
                f'{where}: {self} names no axis yet; uses.with_input_axes(…) finds it in the trace of a model'
            )
        for axis in self.axes:
            tree_lib.check_axis(axis, shape, where)
        if len({axis % len(shape) for axis in self.axes}) < len(self.axes):
            raise ValueError(f'{where}: {self} names an axis of shape {tuple(shape)} twice')
        return self.line_length(shape) % self.m


def is_sparsity_type(instance_to_check: Any) -> bool:
    """Whether something is a single sparsity type; a class is not one.

    Args:
      instance_to_check: anything.

    >>> is_sparsity_type(NByM(2, 4)), is_sparsity_type('2:4'), is_sparsity_type(NByM)
    (True, False, False)
    """
    return isinstance(instance_to_check, SparsityType) and not isinstance(instance_to_check, type)


def is_unstructured(sparsity_type: Any) -> bool:
    """Whether each weight is ranked by its own score, so that scores need no pooling.

    Args:
      sparsity_type: a type. `None` is not unstructured, and a subclass of `Unstructured` may pool scores.

    >>> is_unstructured(Unstructured()), is_unstructured(Channel())
    (True, False)
    """
    return type(sparsity_type) is Unstructured


def is_joint(sparsity_type: Any) -> bool:
    """Whether a sparsity type ties leaves together, by its method `join`; `structure.GroupedChannels` does.

    >>> is_joint(Channel())
    False
    """
    return hasattr(sparsity_type, 'join') and is_sparsity_type(sparsity_type)


_INTEGER = r'\s*([+-]?\d+)\s*'
_COLON = rf'{_INTEGER}:{_INTEGER}'
_PATTERNS: dict[str, Callable[..., SparsityType]] = {
    r'\s*unstructured\s*': Unstructured,
    rf'{_COLON}|\s*nm_{_INTEGER},{_INTEGER}': NByM,
    rf'\s*nm_{_INTEGER},{_INTEGER},{_INTEGER}': NByM,
    rf'\s*block_{_INTEGER},{_INTEGER}': lambda height, width: Block((height, width)),
    rf'\s*channel_{_INTEGER}': Channel,
}
# Name -> function of a config string that begins with it.
_OWN_TYPES: dict[str, Callable[[str], SparsityType]] = {}


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a sparsity type as it stands in configs.

    Args:
      text: `'unstructured'`, `'nm_2,4'`, `'nm_2,4,0'` (with the axis), `'2:4'`, `'block_4,4'`, `'channel_-1'`, or one
        that begins with a name that was given to `register_sparsity_type`.

    Returns:
      The validated type.

    Raises:
      ValueError: the text is none of these.

    >>> parse_sparsity_type('2:4') == parse_sparsity_type('nm_2,4') == NByM(2, 4)
    True
    """
    for pattern, make in _PATTERNS.items():
        if match := re.fullmatch(pattern, text):
            return make(*[int(number) for number in match.groups() if number is not None])
    names = [name for name in _OWN_TYPES if f'{text}_'.startswith(f'{name}_')]
    if names:
        return _OWN_TYPES[max(names, key=len)](text)
    raise ValueError(
        f"unknown sparsity type {text!r}; write 'unstructured', '2:4', 'nm_2,4', 'block_4,4', 'channel_-1', or what is "
        f'registered: {list(_OWN_TYPES)}'
    )


def register_sparsity_type(name: str, parse: Callable[[str], SparsityType]) -> None:
    """Makes a sparsity type of your own known by name, so that configurations, recipes and the command can hold it.

    Args:
      name: with which its config strings begin: `'diagonal'` for `'diagonal'` and `'diagonal_4'`. Of several names that
        fit a string the longest counts. A name that is registered again has its new meaning.
      parse: makes the type of such a string, `'diagonal_4'`. The type is hashable (a frozen dataclass), and has the
        methods of `sparsity_types.GroupedType`.

    Raises:
      TypeError: `parse` cannot be called.
      ValueError: the name has other characters than letters, digits and `_`, or is one of the library's.

    >>> register_sparsity_type('rows', lambda text: Channel(0))
    >>> parse_sparsity_type('rows')
    Channel(axis=0)
    """
    is_name = isinstance(name, str) and name.isidentifier()
    if not is_name or name in ('unstructured', 'nm', 'block', 'channel', 'dense'):
        raise ValueError(
            f"a sparsity type is named by letters, digits and _ alone, not as the library's own, got {name!r}"
        )
    if not callable(parse):
        raise TypeError(
            f'{name!r}: give a function of the text, which makes the type, got {parse!r}'
        )
    _OWN_TYPES[name] = parse


def parse_n_by_m(pattern: Any, axis: int | None = None) -> NByM:
    """Reads an N:M pattern as JAX-Pruning writes it; a partial last group is allowed.

    Args:
      pattern: `(n, m)`, `'n:m'`, or an `NByM`.
      axis: the axis along which groups lie; `None` for that of the `NByM`, or the last.

    Returns:
      The validated type.

    Raises:
      TypeError: the pattern is none of these.
      ValueError: n > m, one of them is not positive, or an `NByM` has another axis.

    >>> parse_n_by_m((2, 4)) == parse_n_by_m('2:4') == NByM(2, 4, allow_partial=True)
    True
    """
    if isinstance(pattern, str) and (match := re.fullmatch(_COLON, pattern)):
        pattern = tuple(map(int, match.groups()))
    if isinstance(pattern, NByM):
        if not isinstance(pattern.axis, int) or axis not in (None, pattern.axis):
            raise ValueError(
                f'{pattern}: give a number as its axis, once, but axis {axis} is asked for'
            )
        return dataclasses.replace(pattern, allow_partial=True)
    if not isinstance(pattern, list | tuple) or len(pattern) != 2:
        raise TypeError(f"an N:M pattern is written (2, 4) or '2:4', got {pattern!r}")
    return NByM(*pattern, axis=-1 if axis is None else axis, allow_partial=True)


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

    >>> leaf = Leaf(('blocks', 'kernel'), (6, 8, 4), np.float32, Channel(), layer_axis=0)
    >>> leaf.name, leaf.layer_shape
    ('blocks/kernel', (8, 4))
    """

    path: tree_lib.Path
    shape: tuple[int, ...]
    dtype: Any
    sparsity_type: SparsityType | None
    layer_axis: int | None
    target: float | None = dataclasses.field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """The path as text."""
        return tree_lib.path_string(self.path)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of what is ranked on its own."""
        return tree_lib.layer_shape(self.shape, self.layer_axis)

    def check_shape(self) -> None:
        """Raises `ValueError` if the sparsity type does not fit the shape."""
        if self.sparsity_type is not None:
            self.sparsity_type.check_shape(self.layer_shape, self.name)


# One type for all leaves, an ordered mapping from names to types, or a function `(path, leaf) -> type`.
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
    if isinstance(setting, Mapping | list | tuple):
        if not setting:
            raise ValueError("sparsity_type has no rule; write {'*': '2:4'} for all leaves")
        rules = tree_lib.read_rules(setting, 'sparsity_type')
        return {
            name: None if entry in (None, 'dense') else read_type(entry)
            for name, entry in rules.items()
        }
    if callable(setting) and not isinstance(setting, type | SparsityType):
        return setting
    return Unstructured() if setting is None else read_type(setting)


def read_type(entry: Any) -> SparsityType:
    """Reads a single sparsity type, or its config string; refuses anything else.

    >>> read_type('2:4')
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """
    read = parse_sparsity_type(entry) if isinstance(entry, str) else entry
    read = Unstructured() if read is Unstructured else read
    is_type = isinstance(read, NByM | GroupedType) or is_joint(read)
    if not is_type or isinstance(read, type) or read.__hash__ is None:
        raise TypeError(
            f'{entry!r} is no sparsity type; use Unstructured(), NByM(2, 4), Block((4, 4)), '
            "Channel(), a string like '2:4', or a hashable object with the methods of sparsity_types.GroupedType"
        )
    return read


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
    if isinstance(setting, Mapping):
        named = tree_lib.values_by_leaf(setting, paths, 'sparsity_type')
        return [named.get(i, Unstructured()) for i in range(len(paths))]
    types = map(setting, paths, leaves)
    return [None if entry is None else read_type(entry) for entry in types]


def check_each(checks: Mapping[tree_lib.Path, Callable[[], object]]) -> None:
    """Refuses all leaves that their sparsity types do not fit in one error, with the setting that leaves them dense.

    Args:
      checks: for each leaf a function that raises a `ValueError` if its type does not fit.

    >>> check_each({('a',): lambda: NByM(2, 4).check_shape((3, 3), 'a')})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a: shape (3, 3) ... not divide. ... leave them dense: sparsity_type={'a': None, '*': …}
    """
    reasons = {}
    for path, check in checks.items():
        try:
            check()
        except ValueError as error:
            reasons[tree_lib.path_string(path)] = str(error)
    if reasons:
        rules = ', '.join(f'{name!r}: None' for name in reasons)
        raise ValueError(
            f'{"; ".join(reasons.values())}. Choose another type, or leave them dense: sparsity_type={{{rules}, '
            "'*': …}"
        )
