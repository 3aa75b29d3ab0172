"""How products can run, and which format is chosen: as was asked, or the fastest by measurement.

There is a class for each format. Its text is its name in settings and reports. It packs matrices `[layers, inputs,
outputs]` into a dictionary of arrays with the layers in front. Inside of the model these make a `matrix`, which
multiplies. All layers of a stack have arrays of one length; shorter ones are filled up. `nonzero` is everywhere
bool[layers, inputs, outputs]: which weights are not zero.

Formats are timed in turns with the dense product, on data of the model's shapes. Layers of one shape are measured once,
and so are formats that differ only in a few weights. NumPy draws the data: JAX would compile a program for each shape,
which takes longer than measuring.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse import csr_matrix
from jaxpruner.sparse.block_matrix import BlockMatrix, BlockShape
from jaxpruner.sparse.formats.blocks import in_blocks
from jaxpruner.sparse.products import Convolution, MatrixLeaf, Products, multiply
from jaxpruner.structure.costs import in_turns
from jaxpruner.text_tables import Column, to_text
from jaxpruner.trace import Use
from jaxpruner.trace.program import bind

Arrays = dict[str, np.ndarray]

DENSE = 'dense'  # the product as it is, which has no class
_MOST_WINDOW_BYTES = 1 << 28
# CSR that stores a larger share of the matrix has never been faster, nor a smaller matrix of a larger share.
_LARGEST_SHARE_OF_CSR = 0.3
_LARGEST_SHARE_OF_SMALLER = 0.95
# From wide to narrow outputs: wide blocks multiply faster.
_BLOCK_OUTPUTS = (512, 256, 128, 64, 32)
_BLOCK_INPUTS = (64, 32, 16, 8, 4, 2, 1)
# Blocks are measured if their estimated cost is below this, in products of the dense matrix.
_LARGEST_COST = 0.85
_MEASURED_SHAPES = 3


@dataclasses.dataclass(frozen=True)
class Csr:
    """Single weights, in CSR; zeros fill short layers up."""

    matrix: ClassVar = csr_matrix.CsrMatrix

    def __str__(self) -> str:
        return 'csr'

    def why_not(self, leaf: MatrixLeaf) -> str | None:
        """Why it cannot run a leaf; `None` if it can."""
        if leaf.inputs * leaf.outputs > np.iinfo(np.int32).max:
            return 'its positions need more than 32 bits'
        return csr_matrix.why_missing(leaf.computed_dtype) or _too_large_windows(leaf)

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        transposed = matrices.swapaxes(1, 2).reshape(len(matrices), -1)
        positions = np.sort(_flagged_first(transposed != 0), axis=1).astype(np.int32)
        first_of_rows = leaf.inputs * np.arange(leaf.outputs + 1)
        row_offsets = [np.searchsorted(of_layer, first_of_rows) for of_layer in positions]
        return {
            'compressed': np.take_along_axis(transposed, positions, axis=1),
            'positions': positions,
            'row_offsets': np.array(row_offsets, np.int32),
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallerMatrix:
    """A dense matrix without inputs and outputs that are zero; for a convolution, without such channels.

    Attributes:
      matrix: [kept inputs, kept outputs].
      inputs: int32[kept inputs], or channels; `None` if all stay.
      outputs: int32[outputs], for each output its column of the matrix; the number of columns, if it is zero. `None` if
        all stay.
    """

    matrix: jax.Array
    inputs: jax.Array | None = None
    outputs: jax.Array | None = None

    def multiply(self, rows: jax.Array, dtype: Any = None) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`, added up in a type."""
        rows = self._kept(rows)
        return self._spread(jnp.matmul(rows, self.matrix, preferred_element_type=dtype))

    def convolve(self, image: jax.Array, convolution: Convolution) -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        image = self._kept(image)
        kernel = self.matrix.reshape(*convolution.window, image.shape[-1], -1)
        return self._spread(convolution.run(image, kernel))

    def _kept(self, values: jax.Array) -> jax.Array:
        if self.inputs is None:
            return values
        return jnp.take(values, self.inputs, axis=-1, mode='clip')

    def _spread(self, values: jax.Array) -> jax.Array:
        """Puts outputs in their places, and zeros in the others.

        Scattering columns is slow on CPUs. So they are gathered, and those of zeros come from an additional column.
        """
        if self.outputs is None:
            return values
        with_zeros = jnp.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, 1)])
        return jnp.take(with_zeros, self.outputs, axis=-1, mode='clip')


@dataclasses.dataclass(frozen=True)
class Smaller:
    """A dense matrix without the inputs and outputs (channels of a convolution) that are zero."""

    matrix: ClassVar = SmallerMatrix

    def __str__(self) -> str:
        return 'smaller'

    def why_not(self, leaf: MatrixLeaf) -> str | None:
        """Why it cannot run a leaf; `None` if it can."""
        return None

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        # A list of channels or outputs that is filled up names some that are zero.
        channels, outputs = (
            np.sort(_flagged_first(used), axis=1) for used in used_lines(leaf, matrices != 0)
        )
        small = matrices.reshape(len(matrices), leaf.window, -1, leaf.outputs)
        number_of_channels = small.shape[2]
        small = np.take_along_axis(small, channels[:, None, :, None], axis=2)
        small = np.take_along_axis(small, outputs[:, None, None, :], axis=3)
        count = outputs.shape[1]
        arrays: Arrays = {'matrix': small.reshape(len(matrices), -1, count)}
        if channels.shape[1] < number_of_channels:
            arrays['inputs'] = channels.astype(np.int32)
        if count < leaf.outputs:
            columns = np.full((len(matrices), leaf.outputs), count, np.int32)
            np.put_along_axis(columns, outputs, np.arange(count)[None], axis=1)
            arrays['outputs'] = columns
        return arrays


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of one shape, the same number for each group of outputs."""

    block: BlockShape
    matrix: ClassVar = BlockMatrix

    def __str__(self) -> str:
        return f'blocks {self.block[0]}x{self.block[1]}'

    def why_not(self, leaf: MatrixLeaf) -> str | None:
        """Why it cannot run a leaf; `None` if it can."""
        if leaf.inputs % self.block[0] or leaf.outputs % self.block[1]:
            return f'blocks do not divide the matrix of {leaf.inputs} x {leaf.outputs}'
        return _too_large_windows(leaf)

    def pack(self, matrices: np.ndarray, leaf: MatrixLeaf) -> Arrays:
        by_group = in_blocks(matrices, *self.block)
        # The blocks that fill a group up hold zeros.
        indices = _flagged_first(by_group.any((-2, -1)))
        values = np.take_along_axis(by_group, indices[..., None, None], axis=2)
        return {'values': values, 'indices': indices.astype(np.int32)}


Format = Csr | Smaller | Blocks
_BLOCKS = re.compile(r'blocks ([1-9]\d*)x([1-9]\d*)')


def parse(text: Any, leaf: MatrixLeaf, nonzero: np.ndarray) -> Format | None:
    """The format that a text names for a leaf, `None` for dense; `'blocks'` means those that promise most.

    Raises:
      ValueError: there is no such format.
    """
    plain = {DENSE: None, 'csr': Csr(), 'smaller': Smaller()}
    if isinstance(text, str) and text in plain:
        return plain[text]
    if text == 'blocks':
        smallest = _BLOCK_INPUTS[-1], _BLOCK_OUTPUTS[-1]
        return Blocks(next(iter(best_blocks(nonzero, math.inf)), smallest))
    match = _BLOCKS.fullmatch(text) if isinstance(text, str) else None
    if not match:
        raise ValueError(
            f"no format {text!r}; the formats are dense, csr, smaller, blocks, and blocks of a shape, 'blocks 8x128'; "
            "for a whole model also 'measure' and 'channels'"
        )
    return Blocks((int(match[1]), int(match[2])))


def candidates(leaf: MatrixLeaf, nonzero: np.ndarray) -> list[Format]:
    """The formats that may be faster than dense."""
    formats: list[Format] = []
    if nonzero.mean() <= _LARGEST_SHARE_OF_CSR:
        formats.append(Csr())
    used = used_lines(leaf, nonzero)
    if (
        math.prod(_largest(each.sum(1)) / each.shape[1] for each in used)
        <= _LARGEST_SHARE_OF_SMALLER
    ):
        formats.append(Smaller())
    formats += map(Blocks, best_blocks(nonzero, _LARGEST_COST)[:_MEASURED_SHAPES])
    return [format for format in formats if not format.why_not(leaf)]


def used_lines(leaf: MatrixLeaf, nonzero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which inputs and outputs have weights: bool[layers, inputs], bool[layers, outputs].

    With a window of several elements inputs are channels: the rows of a matrix are the elements of the window, each
    with all channels.
    """
    used_inputs = nonzero.any(2).reshape(len(nonzero), leaf.window, -1)
    return used_inputs.any(1), nonzero.any(1)


def best_blocks(nonzero: np.ndarray, largest_cost: float) -> list[BlockShape]:
    """The shapes of blocks that promise a product below a cost, the fastest first.

    The cost of a shape is a rough estimate, in products of the dense matrix. The best shapes are then measured.

    >>> nonzero = np.zeros((1, 64, 256), bool)
    >>> nonzero[:, :8, :128] = nonzero[:, 56:, 128:] = True
    >>> best_blocks(nonzero, 0.75)[0]
    (8, 128)
    """
    _, inputs, outputs = nonzero.shape
    if nonzero.mean() > largest_cost:
        return []
    costs: dict[BlockShape, float] = {}
    for width, height in itertools.product(_BLOCK_OUTPUTS, _BLOCK_INPUTS):
        if inputs % height or outputs % width:
            continue
        by_group = in_blocks(nonzero, height, width).any((-2, -1))
        stored = by_group.shape[1] * _largest(by_group.sum(-1)) * height * width
        # Narrow groups multiply more slowly, and single inputs are gathered more slowly.
        cost = (1 + 64 / width) * (1 + 0.5 / height) * stored / (inputs * outputs)
        if cost <= largest_cost:
            costs[height, width] = cost
    return sorted(costs, key=costs.__getitem__)


def _flagged_first(flags: np.ndarray) -> np.ndarray:
    """The flagged positions along the last axis, in lists of one length; other positions fill short lists up."""
    order = np.argsort(~flags, axis=-1, kind='stable')
    return order[..., : _largest(flags.sum(-1))]


def _largest(counts: np.ndarray) -> int:
    """The largest count, at least one: arrays that are stored are never empty."""
    return max(int(counts.max(initial=0)), 1)


def _too_large_windows(leaf: MatrixLeaf) -> str | None:
    """Says that the windows of a convolution would take much memory; `None` if not."""
    size = leaf.flops // (2 * leaf.outputs) * leaf.dtype.itemsize
    if leaf.op == 'conv' and size > _MOST_WINDOW_BYTES:
        return f'the windows of its images would take {size >> 20} MiB'
    return None


Matrices = Mapping[str, np.ndarray]  # [layers, inputs, outputs] by name of the leaf
# Those of leaves that are not dense, by name of the leaf.
Formats = dict[str, Format]

_LONG_ENOUGH = 5e-3  # seconds
# Candidates whose arrays differ by less than this factor in size are measured once.
_BUCKET = 1.05
# How many times as fast as dense a format has to be, in three rounds of four.
_LEAST_GAIN = 1.05
# Products that are a smaller share of all multiplications are not measured: many models have a lot of them.
_LEAST_SHARE = 1e-3
_COLUMNS = (
    Column('leaf', overflow='fold'),
    Column('matrix', overflow='fold'),
    Column('kept', align='right'),
    Column('format'),
    Column('ms', align='right'),
    Column('others, ms', overflow='wrap'),
)


@dataclasses.dataclass(frozen=True)
class LayerExecution:
    """How one leaf is run.

    Attributes:
      shape: `[*layers, inputs, outputs]` of its matrices.
      density: the share of its weights that are not zero.
      format: that was chosen.
      milliseconds: format -> time of all products with the leaf in one call; empty if nothing was measured.

    >>> layer = LayerExecution((256, 256), 0.02, 'csr', {'dense': 0.4, 'csr': 0.1})
    >>> layer.milliseconds['dense'] / layer.milliseconds[layer.format]
    4.0
    """

    shape: tuple[int, ...]
    density: float
    format: str
    milliseconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ExecutionReport:
    """What was measured and chosen for a model; `str` is a table.

    Attributes:
      layers: name of a leaf -> how it is run.
      dense_leaves: name -> why a leaf stays dense and was not measured.
      channels: group of channels -> how many were removed because they are zero.
      milliseconds: the time of a call of the dense model; `None` if nothing was measured.
      measured: that of the compiled model.

    >>> report = ExecutionReport(layers={}, dense_leaves={'bias': 'no contraction reads it'})
    >>> print(report)
    bias: dense, since no contraction reads it
    """

    layers: Mapping[str, LayerExecution]
    dense_leaves: Mapping[str, str]
    channels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    milliseconds: float | None = None
    measured: float | None = None

    def __str__(self) -> str:
        rows = []
        for name, layer in self.layers.items():
            times = {each: f'{time:.3g}' for each, time in layer.milliseconds.items()}
            own = times.pop(layer.format, '')
            others = ', '.join(f'{each}: {time}' for each, time in times.items())
            shape = '×'.join(map(str, layer.shape))
            rows.append([name, shape, f'{layer.density:.1%}', layer.format, own, others])
        lines = [to_text(_COLUMNS, rows)] if rows else []
        if self.channels:
            removed = ', '.join(f'{count} of {name}' for name, count in self.channels.items())
            lines.append(f'channels that are zero were removed: {removed}')
        if self.milliseconds is not None:
            lines.append(f'a call: dense {self.milliseconds:.3g} ms, now {self.measured:.3g} ms')
        for name, reason in self.dense_leaves.items():
            lines.append(f'{name}: dense, since {reason}')
        return '\n'.join(lines)


def measured_formats(
    products: Products, matrices: Matrices, rounds: int, progress: bool
) -> tuple[Formats, dict[str, dict[str, float]]]:
    """The fastest format of each leaf; dense unless another is faster beyond noise. Then the milliseconds of each."""
    total = sum(leaf.flops for leaf in products.by_leaf.values())
    chosen: Formats = {}
    milliseconds: dict[str, dict[str, float]] = {}
    known: dict[Hashable, Any] = {}
    with progress_bar(len(matrices), progress) as show:
        for number, (name, matrix) in enumerate(matrices.items()):
            show(name, number)
            leaf = products.by_leaf[name]
            formats = candidates(leaf, matrix != 0) if leaf.flops >= _LEAST_SHARE * total else []
            if not formats:
                continue
            packed = {format: format.pack(matrix, leaf) for format in formats}
            seconds, gains = _times(leaf, packed, rounds, known)
            names = [DENSE, *map(str, formats)]
            milliseconds[name] = dict(zip(names, (1e3 * seconds).tolist(), strict=True))
            seconds[1:][gains[1:] < _LEAST_GAIN] = math.inf
            if best := int(np.argmin(seconds)):
                chosen[name] = formats[best - 1]
    return chosen, milliseconds


def asked_formats(products: Products, matrices: Matrices, setting: Any) -> Formats:
    """The formats that a setting names; leaves that it does not name stay dense.

    Args:
      products: of the model.
      matrices: by name of the leaf.
      setting: one format for all leaves that it suits, or a mapping from names or globs to formats. A leaf takes the
        format of the first name that matches it.

    Raises:
      ValueError: there is no such format, or a name matches no leaf that can run in its format.
    """
    rules = setting if isinstance(setting, Mapping) else {'*': setting}
    texts = tree_lib.values_by_leaf(rules, list(products.paths.values()), 'formats')
    chosen, reasons = {}, dict(products.refused)
    for i, name in enumerate(products.paths):
        if i not in texts or name not in matrices:
            continue
        leaf = products.by_leaf[name]
        format = parse(texts[i], leaf, matrices[name] != 0)
        reason = format and format.why_not(leaf)
        if reason:
            reasons[name] = reason
        elif format:
            chosen[name] = format
    for rule, text in rules.items():
        matched = [each for each, path in products.paths.items() if tree_lib.matches(rule, path)]
        if text != DENSE and not any(name in chosen for name in matched):
            listed = [f'{name}: {reasons[name]}' for name in matched if name in reasons]
            raise ValueError(
                f'formats={setting!r}: no leaf of this model that {rule!r} names can run as {text!r}: '
                f"{'; '.join(listed[:8])}; name 'dense' for them"
            )
    return chosen


def _times(
    leaf: MatrixLeaf, packed: Mapping[Format, Arrays], rounds: int, known: dict[Hashable, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The seconds of the dense product, then of each candidate, added up over product sites and trips of loops.

    In three rounds of four each is at least as many times as fast as the dense product as the second array says.
    Timings are remembered in `known`.
    """
    seconds, gains = np.zeros(1 + len(packed)), np.full(1 + len(packed), np.inf)
    # About as much of a layer, stored in the same formats.
    buckets = []
    for format, arrays in packed.items():
        sizes = [max(array[0].size, 1) for array in arrays.values()]
        buckets.append((format, *[round(math.log(size, _BUCKET)) for size in sizes]))
    for use in leaf.matrices.uses:
        site = use.site
        avals = [str(variable.aval) for variable in site.equation.invars]
        key = str(site.equation.params), *avals, site.operand, *buckets
        if key not in known:
            times = np.array(_measured(use, leaf, packed, rounds))
            known[key] = np.median(times, 1), np.quantile(times[0] / times, 0.25, axis=1)
        own_seconds, own_gains = known[key]
        seconds += (use.trips or 1) * own_seconds
        gains = np.minimum(gains, own_gains)
    return seconds, gains


def _measured(
    use: Use, leaf: MatrixLeaf, packed: Mapping[Format, Arrays], rounds: int
) -> list[list[float]]:
    """The seconds of a product in each round: dense, and in each format."""
    rng, operands, equation = np.random.default_rng(0), [], use.site.equation
    for variable in equation.invars:
        drawn = rng.standard_normal(variable.aval.shape, np.float32)
        operands.append(jnp.asarray(drawn.astype(variable.aval.dtype)))
    dense = jax.jit(lambda *operands: bind(equation, operands))
    calls = [functools.partial(dense, *operands)]
    # The first trip of the loops around a product gets these arrays.
    first = (0,) * len(use.site.view.stack)
    for format, arrays in packed.items():

        def in_format(data: jax.Array, arrays: Any, format: Format = format) -> Any:
            return multiply(use, data, format.matrix(**arrays))

        layer = {}
        for key, array in arrays.items():
            layer[key] = jnp.asarray(array.reshape(*leaf.layers, *array.shape[1:])[first])
        data = operands[1 - use.site.operand]
        calls.append(functools.partial(jax.jit(in_format), data, layer))
    return in_turns(calls, rounds, _LONG_ENOUGH)
