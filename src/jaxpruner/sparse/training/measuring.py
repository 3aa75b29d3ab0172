"""The block with which a product and its derivatives are computed fastest, on the device at hand."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.operators import blocks
from jaxpruner.sparse.operators.block_kernels.choosing import why_missing as why_no_kernel
from jaxpruner.sparse.operators.block_kernels.product import multiply as multiply_in_kernel
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.training import block_positions
from jaxpruner.sparse.training.layouts import Layout, NoLayoutError, has_surplus, layout_for

# Wide blocks are fast, narrow ones reach more inputs.
CANDIDATES: tuple[BlockShape, ...] = (
    *((1, 128), (4, 128), (8, 128), (16, 128), (8, 256), (16, 256), (8, 512)),
    *((4, 32), (8, 64), (16, 64), (64, 64), (128, 128)),
)
_REPEATS = 5


class BlockTimings:
    """Measures once for each shape; all layers of a stack count as one.

    Attributes:
      seconds: the time of a product and its derivatives, by shape of the matrix, rows, sparsity, rank, and layout.
    """

    def __init__(self, show: Callable[..., None] = lambda *_: None, with_kernels: bool = True):
        self.seconds: dict[tuple, dict[Layout, float]] = {}
        self._show = show
        self._with_kernels = with_kernels

    def fastest(self, matrix_leaf: MatrixLeaf, sparsity: float, rank: int) -> Layout:
        """The fastest layout of those that keep about the asked number of weights, and reach all inputs.

        Falls back to layouts with the right number of weights, then to any.

        Raises:
          NoLayoutError: all candidates are larger than the matrix, or the rank is too large for the sparsity.
        """
        shape = matrix_leaf.inputs, matrix_leaf.outputs
        rows = max(matrix_leaf.rows)
        dtype = matrix_leaf.computed_dtype
        key = (shape, rows, str(dtype), sparsity, rank)
        if key not in self.seconds:
            self._show(matrix_leaf.name, len(self.seconds))
            layouts = _layouts(shape, sparsity, rank)
            if self._with_kernels:
                layouts += _in_kernels(layouts, dtype)
            self.seconds[key] = _timed(layouts, rows, dtype)
        seconds = self.seconds[key]
        fastest = min(seconds, key=seconds.__getitem__)
        return dataclasses.replace(fastest, layers=matrix_leaf.layers)


def _layouts(shape: tuple[int, int], sparsity: float, rank: int) -> list[Layout]:
    """The layouts from which `fastest` chooses."""
    layouts = []
    problem = NoLayoutError('there is no candidate')
    for block in CANDIDATES:
        try:
            layouts.append(layout_for((), shape, block, sparsity, rank))
        except NoLayoutError as error:
            problem = error
    if not layouts:
        raise problem
    exact = [layout for layout in layouts if not has_surplus(layout, sparsity)]
    covering = [layout for layout in exact if layout.input_coverage == 1]
    return covering or exact or layouts


def _in_kernels(layouts: list[Layout], dtype: jnp.dtype) -> list[Layout]:
    """The layouts that kernels suit, now with a kernel."""
    found = []
    for layout in layouts:
        stored = layout.groups * layout.blocks
        if why_no_kernel(dtype, layout.block, stored=stored) is None:
            found.append(dataclasses.replace(layout, in_kernel=True))
    return found


def _timed(layouts: list[Layout], rows: int, dtype: jnp.dtype) -> dict[Layout, float]:
    """The median time of each layout over rounds in which each takes its turn."""
    calls = {layout: _call(layout, rows, dtype) for layout in layouts}
    times: dict[Layout, list[float]] = {layout: [] for layout in calls}
    for call in calls.values():
        _seconds(call)  # compiles it
    for _ in range(_REPEATS):
        for layout, call in calls.items():
            times[layout].append(_seconds(call))
    return {layout: statistics.median(seconds) for layout, seconds in times.items()}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def _call(layout: Layout, rows: int, dtype: jnp.dtype) -> Callable[[], object]:
    """A call of a product in this layout, and of its derivatives."""
    rng = np.random.default_rng(0)
    positions = jnp.asarray(block_positions.balanced(layout, rng))
    values = jnp.ones((layout.groups, layout.blocks, *layout.block), dtype)
    inputs = jnp.ones((rows, layout.inputs), dtype)
    cotangents = jnp.ones((rows, layout.outputs), dtype)
    multiply = multiply_in_kernel if layout.in_kernel else blocks.multiply

    @jax.jit
    def run(
        inputs: jax.Array, values: jax.Array, positions: jax.Array, cotangents: jax.Array
    ) -> object:
        def product(inputs: jax.Array, values: jax.Array) -> jax.Array:
            return multiply(inputs, values, positions, outputs=layout.outputs)

        result, back = jax.vjp(product, inputs, values)
        return result, back(cotangents.astype(result.dtype))

    return lambda: run(inputs, values, positions, cotangents)
