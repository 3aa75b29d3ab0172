"""Which sets of weights are removed together: single weights, N of M, blocks, channels.

A type that pools scores over groups of weights and spreads the groups' verdicts back is all that is needed: counting
and selecting is the same for all (`mask_calculator`). N:M ranks inside its groups instead. Strings are read once, by
`parse_sparsity_type`; array code sees only the validated objects.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxpruner.core.named_fields import NamedFields


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


def is_sparsity_type(instance_to_check: Any) -> bool:
    """Whether something is a single sparsity type; a class is none.

    Args:
      instance_to_check: anything.

    >>> is_sparsity_type(NByM(2, 4)), is_sparsity_type('2:4'), is_sparsity_type(NByM)
    (True, False, False)
    """
    return isinstance(instance_to_check, SparsityType) and not isinstance(instance_to_check, type)


def _check_whole(name: str, value: Any, minimum: int | None = None) -> None:
    if isinstance(value, bool) or not hasattr(value, '__index__'):
        raise TypeError(f'{name} must be a whole number, got {value!r}')
    if minimum is not None and value < minimum:
        raise ValueError(f'{name} must be at least {minimum}, got {value}')


@dataclasses.dataclass(frozen=True)
class Unstructured(NamedFields):
    """Every weight stands alone. Config string: `'unstructured'`.

    >>> Unstructured()
    Unstructured()
    """

    _fields = ()

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape.

        >>> Unstructured().check_shape((3, 5), 'kernel')
        """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """The scores: each weight is a group."""
        return scores

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The mask as it is."""
        del shape
        return group_mask


_GROUPING = ('check_shape', 'group_scores', 'spread_groups')


def is_unstructured(sparsity_type: Any) -> bool:
    """Whether each weight is ranked by its own score, so that scores need no pooling.

    True for `Unstructured` and for subclasses that leave its methods as they are. A subclass with a method of its own
    may pool scores in another way.

    Args:
      sparsity_type: a type; `None` is not unstructured.

    >>> is_unstructured(Unstructured()), is_unstructured(Channel())
    (True, False)
    """
    if not isinstance(sparsity_type, Unstructured):
        return False
    own = type(sparsity_type)
    return all(getattr(own, name) is getattr(Unstructured, name) for name in _GROUPING)


# The axis along which a model sums, in whatever layout its framework has.
INPUT_AXIS = 'input'


@dataclasses.dataclass(frozen=True)
class NByM(NamedFields):
    """Of each `m` consecutive weights along `axis`, the best `n` are kept. Config strings: `'nm_2,4'`, `'2:4'`.

    Attributes:
      n: weights kept in a group.
      m: weights in a group.
      axis: the axis along which groups lie; `'input'` for that along which the model sums, which
        `uses.with_input_axes` replaces by a number for each leaf.
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
        if isinstance(self.axis, str) and self.axis != INPUT_AXIS:
            raise TypeError(f"axis must be a whole number or 'input', got {self.axis!r}")
        if self.axis != INPUT_AXIS:
            _check_whole('axis', self.axis)
        if self.n > self.m:
            raise ValueError(
                f'N:M sparsity keeps n of m weights, so n must not exceed m, got n={self.n}, m={self.m}'
            )

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape whose axis does not divide into groups of m.

        Args:
          shape: the parameter's shape.
          where: the parameter's path, for the message.

        Raises:
          ValueError: there is no such axis, or m does not divide it.

        >>> NByM(2, 4).check_shape((3, 8), 'dense/kernel')
        """
        rest = self.partial_group(shape, where)
        if rest and not self.allow_partial:
            raise ValueError(
                f'{where}: shape {tuple(shape)} has length {shape[self.axis]} along axis {self.axis}, which m={self.m} '
                f"does not divide; choose another axis or m, or leave the leaf dense: sparsity_type={{'{where}': None, "
                "'*': …}"
            )

    def partial_group(self, shape: Sequence[int], where: str) -> int:
        """The length of the last group where m does not divide the axis, else 0.

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
                f'{where}: {self} is not known to lie along an axis; which one the model sums over, its trace says: '
                'sparsity_type=uses.with_input_axes(…, uses.param_uses(apply_fn, params, inputs))'
            )
        return shape[_axis_in(self.axis, shape, where)] % self.m


@dataclasses.dataclass(frozen=True)
class Block(NamedFields):
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

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Means or maxima of the blocks, in one array with the blocks' rows and columns as its last axes.

        >>> Block((1, 2)).group_scores(jnp.array([[1.0, 3.0, 5.0]]))
        Array([[2., 5.]], dtype=float32)
        """
        # Sums of 16-bit scores would lose what tells blocks apart.
        dtype = (
            jnp.promote_types(scores.dtype, jnp.float32) if self.use_avg_pooling else scores.dtype
        )
        pooled, sizes = scores.astype(dtype), jnp.ones((), dtype)
        for axis, length in self._axes(scores.ndim):
            size, blocks = scores.shape[axis], -(-scores.shape[axis] // length)
            padding = [(0, 0)] * scores.ndim
            padding[axis] = (0, blocks * length - size)
            padded = jnp.pad(
                pooled, padding, constant_values=0 if self.use_avg_pooling else -jnp.inf
            )
            split = padded.reshape(*pooled.shape[:axis], blocks, length, *pooled.shape[axis + 1 :])
            pooled = split.sum(axis + 1) if self.use_avg_pooling else split.max(axis + 1)
            along = jnp.minimum(length, size - length * jnp.arange(blocks)).astype(dtype)
            sizes = sizes * along.reshape((blocks,) + (1,) * (scores.ndim - 1 - axis))
        return pooled / sizes if self.use_avg_pooling else pooled

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Each block's verdict for all of its weights.

        >>> Block((1, 2)).spread_groups(jnp.array([[1, 0]], jnp.uint8), (1, 3))
        Array([[1, 1, 0]], dtype=uint8)
        """
        for axis, length in self._axes(len(shape)):
            # Broadcast, not jnp.repeat, which looks the verdicts up and gathers those of all devices for it.
            before, after = group_mask.shape[: axis + 1], group_mask.shape[axis + 1 :]
            spread = jnp.broadcast_to(
                jnp.expand_dims(group_mask, axis + 1), (*before, length, *after)
            )
            padded = spread.reshape(*before[:-1], before[-1] * length, *after)
            group_mask = jax.lax.slice_in_dim(padded, 0, shape[axis], axis=axis)
        return group_mask

    def _axes(self, rank: int) -> list[tuple[int, int]]:
        """Axis and block length for each blocked axis: none of a scalar, one of a vector."""
        pairs = zip((rank - 2, rank - 1), self.block_shape, strict=True)
        return [(axis, length) for axis, length in pairs if axis >= 0]


@dataclasses.dataclass(frozen=True)
class Channel(NamedFields):
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
        _axis_in(self.axis, shape, where)

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Sums over all other axes: one score for each channel.

        >>> Channel(-1).group_scores(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        Array([4., 6.], dtype=float32)
        """
        # Sums of 16-bit scores would overflow.
        dtype = jnp.promote_types(scores.dtype, jnp.float32)
        return jnp.sum(scores.astype(dtype), axis=self._others(scores.ndim))

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Each channel's verdict for all of its weights.

        >>> Channel(-1).spread_groups(jnp.array([0, 1], jnp.uint8), (2, 2))
        Array([[0, 1],
               [0, 1]], dtype=uint8)
        """
        return jnp.broadcast_to(jnp.expand_dims(group_mask, self._others(len(shape))), shape)

    def _others(self, rank: int) -> tuple[int, ...]:
        return tuple(axis for axis in range(rank) if axis != self.axis % rank)


def _axis_in(axis: int, shape: Sequence[int], where: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f'{where}: axis {axis} does not exist in shape {tuple(shape)}; use one in [{-len(shape)}, {len(shape)})'
        )
    return axis


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
    if isinstance(pattern, NByM):
        if pattern.axis == INPUT_AXIS:
            raise ValueError(
                f'{pattern} is for the parameters of a model whose uses are known; give a number as its axis'
            )
        if axis not in (None, pattern.axis):
            raise ValueError(
                f'{pattern} lies along axis {pattern.axis}, but axis {axis} is asked for; give one of them'
            )
        return dataclasses.replace(pattern, allow_partial=True)
    if isinstance(pattern, str) and (found := re.fullmatch(rf'{_INTEGER}:{_INTEGER}', pattern)):
        pattern = tuple(map(int, found.groups()))
    if not isinstance(pattern, list | tuple) or len(pattern) != 2:
        raise TypeError(
            f"an N:M pattern is written (n, m) or 'n:m', such as (2, 4), got {pattern!r}"
        )
    return NByM(*pattern, axis=-1 if axis is None else axis, allow_partial=True)
