"""The block with which a product and its derivatives are computed fastest, on the device at hand."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable

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
    (1, 128),
    (4, 128),
    (8, 128),
    (16, 128),
    (8, 256),
    (16, 256),
    (8, 512),
    (4, 32),
    (8, 64),
    (16, 64),
    (64, 64),
    (128, 128),
)
_REPEATS = 5


class BlockTimings:
    """Measures once for each shape; the layers of a stack count as one leaf.

    Attributes:
      seconds: the time of a product and its derivatives, by shape of the matrix, rows, sparsity, rank, and layout.
    """

    def __init__(self, show: Callable[..., None] = lambda *_: None, with_kernels: bool = True):
        self.seconds: dict[Hashable, dict[Layout, float]] = {}
        self._show = show
        self._with_kernels = with_kernels

    def fastest(self, matrix_leaf: MatrixLeaf, sparsity: float, rank: int) -> Layout:
        """The fastest of the layouts that keep about as many weights as were asked for, and reach all inputs.

        If there is none, it is the fastest of those with the right number of weights, or else of all.

        Raises:
          NoLayoutError: all candidates are larger than the matrix, or the rank is too large for the sparsity.
        """
        shape = matrix_leaf.inputs, matrix_leaf.outputs
        rows = max(matrix_leaf.rows)
        dtype = matrix_leaf.computed_dtype
        key = (shape, rows, str(dtype), sparsity, rank)
        if key not in self.seconds:
            measured = len(self.seconds)
            self._show(matrix_leaf.name, measured)
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
            layout = layout_for((), shape, block, sparsity, rank)
        except NoLayoutError as error:
            problem = error
        else:
            layouts.append(layout)
    if not layouts:
        raise problem
    exact = [layout for layout in layouts if not has_surplus(layout, sparsity)]
    covering = [layout for layout in exact if layout.input_coverage == 1]
    return covering or exact or layouts


def _in_kernels(layouts: list[Layout], dtype: jnp.dtype) -> list[Layout]:
    """Copies, with a kernel, of the layouts for which there is one."""
    with_kernel = []
    for layout in layouts:
        stored = layout.groups * layout.blocks
        missing = why_no_kernel(dtype, layout.block, stored=stored)
        if missing is None:
            with_kernel.append(dataclasses.replace(layout, in_kernel=True))
    return with_kernel


def _timed(layouts: list[Layout], rows: int, dtype: jnp.dtype) -> dict[Layout, float]:
    """The median time of each layout over rounds in which each takes its turn."""
    calls: dict[Layout, Callable[[], object]] = {}
    times: dict[Layout, list[float]] = {}
    for layout in layouts:
        call = _call(layout, rows, dtype)
        _seconds(call)  # compiles it
        calls[layout] = call
        times[layout] = []
    for _ in range(_REPEATS):
        for layout, call in calls.items():
            seconds = _seconds(call)
            times[layout].append(seconds)
    medians = {}
    for layout, seconds in times.items():
        medians[layout] = statistics.median(seconds)
    return medians


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def _call(layout: Layout, rows: int, dtype: jnp.dtype) -> Callable[[], object]:
    """A call of a product in this layout, and of its derivatives."""
    rng = np.random.default_rng(0)
    positions = block_positions.balanced(layout, rng)
    operands = (
        jnp.ones((rows, layout.inputs), dtype),
        jnp.ones(layout.values_shape, dtype),
        jnp.asarray(positions),
        jnp.ones((rows, layout.outputs), dtype),
    )
    multiply = multiply_in_kernel if layout.in_kernel else blocks.multiply

    @jax.jit
    def run(
        inputs: jax.Array, values: jax.Array, positions: jax.Array, cotangents: jax.Array
    ) -> object:
        def product(inputs: jax.Array, values: jax.Array) -> jax.Array:
            return multiply(inputs, values, positions, outputs=layout.outputs)

        result, differentiate = jax.vjp(product, inputs, values)
        cotangents = cotangents.astype(result.dtype)
        return result, differentiate(cotangents)

    return lambda: run(*operands)
