"""Chooses the format of each product: as was asked, or the fastest by measurement.

Formats are timed in turns with the dense product, on data of the model's shapes. Layers of one shape are measured once,
and so are formats that differ only in a few weights. NumPy draws the data: JAX would compile a program for each shape,
which takes longer than measuring.
"""

import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse.execution import formats
from jaxpruner.sparse.execution.formats import DENSE, Arrays, Format
from jaxpruner.sparse.execution.report import LayerExecution
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.program.product_sites import multiply
from jaxpruner.structure.latency import in_turns, repeats_of
from jaxpruner.trace import Use
from jaxpruner.trace.program import bind

Matrices = Mapping[str, np.ndarray]  # [layers, inputs, outputs] by name of the leaf
# Those of leaves that are not dense, by name of the leaf.
Formats = dict[str, Format]
Layers = dict[str, LayerExecution]

_LONG_ENOUGH = 5e-3  # seconds
# Candidates whose arrays differ by less than this factor in size are measured once.
_BUCKET = 1.05
_MOST_LISTED = 8  # leaves in a message
# How many times as fast as dense a format has to be, in three rounds of four.
_LEAST_GAIN = 1.05
# Products that are a smaller share of all multiplications are not measured: many models have a lot of them.
_LEAST_SHARE = 1e-3


def matrices_of(products: Products, params: tree_lib.PyTree) -> dict[str, np.ndarray]:
    """The matrices of the leaves of parameters."""
    matrices = {}
    for name, leaf in products.leaves(params).items():
        matrix_leaf = products.by_leaf[name]
        values = np.asarray(matrix_leaf.to_matrix(leaf))
        matrices[name] = values.reshape(-1, matrix_leaf.inputs, matrix_leaf.outputs)
    return matrices


def measured_formats(
    products: Products, matrices: Matrices, rounds: int, progress: bool
) -> tuple[Formats, Layers]:
    """The fastest format of each leaf; dense unless another is faster beyond noise. Then what was measured."""
    total = sum(leaf.flops for leaf in products.by_leaf.values())
    chosen: Formats = {}
    layers: Layers = {}
    known: dict[Hashable, Any] = {}
    with progress_bar(len(matrices), progress) as show:
        for number, (name, matrix) in enumerate(matrices.items()):
            show(name, number)
            leaf, packed = products.by_leaf[name], {}
            if leaf.flops >= _LEAST_SHARE * total:
                for format in formats.candidates(leaf, matrix != 0):
                    packed[format] = format.pack(matrix, leaf)
            milliseconds = {}
            if packed:
                seconds, gains = _times(leaf, packed, rounds, known)
                names = [DENSE, *map(str, packed)]
                milliseconds = dict(zip(names, (1e3 * seconds).tolist(), strict=True))
                seconds[1:][gains[1:] < _LEAST_GAIN] = math.inf
                best = int(np.argmin(seconds))
                if best:
                    chosen[name] = list(packed)[best - 1]
            layers[name] = layer_of(leaf, matrix, chosen.get(name), milliseconds)
    return chosen, layers


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
    numbers = tree_lib.first_matches(list(rules), list(products.paths.values()), 'formats')
    texts = list(rules.values())
    chosen, reasons = {}, dict(products.refused)
    for name, number in zip(products.paths, numbers, strict=True):
        if number is None or name not in matrices:
            continue
        leaf = products.by_leaf[name]
        format = formats.parse(texts[number], leaf, matrices[name] != 0)
        reason = format and format.why_not(leaf)
        if reason:
            reasons[name] = reason
        elif format:
            chosen[name] = format
    for rule, text in rules.items():
        paths = products.paths.items()
        matched = [name for name, path in paths if tree_lib.matches(rule, path)]
        if text != DENSE and not any(name in chosen for name in matched):
            listed = [f'{name}: {reasons[name]}' for name in matched if name in reasons]
            raise ValueError(
                f'formats={setting!r}: no leaf of this model that {rule!r} names can run as {text!r}: '
                f"{'; '.join(listed[:_MOST_LISTED])}; name 'dense' for them"
            )
    return chosen


def layer_of(
    leaf: MatrixLeaf,
    matrices: np.ndarray,
    format: Format | None = None,
    milliseconds: Mapping[str, float] | None = None,
) -> LayerExecution:
    """The row of a report for a leaf in a format, `None` for dense."""
    return LayerExecution(
        shape=(*leaf.layers, leaf.inputs, leaf.outputs),
        density=float((matrices != 0).mean()),
        format=str(format or DENSE),
        milliseconds=milliseconds or {},
    )


def _times(
    leaf: MatrixLeaf, candidates: Mapping[Format, Arrays], rounds: int, known: dict[Hashable, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The seconds of the dense product, then of each candidate, added up over product sites and trips of loops.

    In three rounds of four each is at least as many times as fast as the dense product as the second array says.
    Timings are remembered in `known`.
    """
    seconds, gains = np.zeros(1 + len(candidates)), np.full(1 + len(candidates), np.inf)
    # About as much of a layer, stored in the same formats.
    buckets = []
    for format, arrays in candidates.items():
        sizes = [max(array[0].size, 1) for array in arrays.values()]
        buckets.append((format, *[round(math.log(size, _BUCKET)) for size in sizes]))
    for use in leaf.uses:
        site = use.site
        avals = [str(variable.aval) for variable in site.equation.invars]
        key = str(site.equation.params), *avals, site.operand, *buckets
        if key not in known:
            times = np.array(_measured(use, leaf, candidates, rounds))
            known[key] = np.median(times, 1), np.quantile(times[0] / times, 0.25, axis=1)
        own_seconds, own_gains = known[key]
        seconds += (use.trips or 1) * own_seconds
        gains = np.minimum(gains, own_gains)
    return seconds, gains


def _measured(
    use: Use, leaf: MatrixLeaf, candidates: Mapping[Format, Arrays], rounds: int
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
    for format, arrays in candidates.items():

        def in_format(data: jax.Array, arrays: Any, format: Format = format) -> Any:
            return multiply(use, data, format.operator(arrays, leaf))

        layer = {}
        for key, array in arrays.items():
            layer[key] = jnp.asarray(array.reshape(*leaf.layers, *array.shape[1:])[first])
        data = operands[1 - use.site.operand]
        calls.append(functools.partial(jax.jit(in_format), data, layer))
    return in_turns(calls, [repeats_of(call, _LONG_ENOUGH) for call in calls], rounds)
