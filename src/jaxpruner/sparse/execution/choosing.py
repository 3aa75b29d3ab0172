"""Chooses the format of each product: as was asked, or the fastest by measurement.

Formats are timed in turns with the dense product, on data of the model's shapes. Layers of one shape are measured once,
and so are formats that differ only in a few weights. NumPy draws the data: JAX would compile a program for each shape,
which takes longer than measuring.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse.execution import formats
from jaxpruner.sparse.execution.formats import (
    DENSE,
    Arrays,
    ExecutedFormat,
    UnsuitableFormatError,
)
from jaxpruner.sparse.execution.report import LayerExecution
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.structure.latency import Call, in_turns, repeats_of
from jaxpruner.trace.program import bind

Layers = dict[str, LayerExecution]
Matrices = Mapping[str, np.ndarray]  # [layers, inputs, outputs] by name of the leaf
Candidates = Mapping[ExecutedFormat, Arrays]  # each format with the arrays of all layers of a leaf

_LONG_ENOUGH = 5e-3  # seconds
# Candidates whose numbers of weights differ by less than this factor are measured once.
_BUCKET = 1.05
_MOST_LISTED = 8  # leaves in a message
# How many times as fast as dense a format has to be, in three rounds of four.
_LEAST_GAIN = 1.05
# Small products are not measured if together they have less than this share of all multiplications: many models have a
# lot of them.
_NEGLIGIBLE_SHARE = 0.01
_NEGLIGIBLE = {
    'another format': f'such products are less than {_NEGLIGIBLE_SHARE:.0%} of all together'
}
_NO_N_BY_M = 'neither JAX nor jaxpruner has a kernel that makes it faster, on any device'


class Timing(NamedTuple):
    """How long a product takes at one site of the model, or all products with a leaf in one call.

    Attributes:
      seconds: the median.
      gain: in three rounds of four it is at least this many times as fast as the dense product.
    """

    seconds: float
    gain: float


def matrices_of(products: Products, params: tree_lib.PyTree) -> dict[str, np.ndarray]:
    """The matrices of the leaves of parameters."""
    matrices = {}
    for name, leaf in products.leaves(params).items():
        matrix_leaf = products.by_leaf[name]
        values = np.asarray(matrix_leaf.to_matrix(leaf))
        matrices[name] = values.reshape(-1, matrix_leaf.inputs, matrix_leaf.outputs)
    return matrices


def measured_layers(products: Products, matrices: Matrices, rounds: int, progress: bool) -> Layers:
    """The fastest format of each leaf; dense unless another is faster beyond noise."""
    work = {name: products.by_leaf[name].multiplications for name in matrices}
    left, negligible = _NEGLIGIBLE_SHARE * sum(work.values()), set()
    for name in sorted(work, key=work.__getitem__):
        left -= work[name]
        if left >= 0:
            negligible.add(name)
    layers: Layers = {}
    known: dict[Hashable, list[Timing]] = {}
    with progress_bar(len(matrices), progress) as show:
        for number, name in enumerate(matrices):
            show(name, number)
            leaf = products.by_leaf[name]
            found, refused = [], _NEGLIGIBLE
            if name not in negligible:
                found, refused = formats.candidates(leaf, matrices[name] != 0)
            candidates = {format: format.pack(matrices[name], leaf) for format in found}
            best, milliseconds = None, {}
            if candidates:
                dense, *timings = _times(leaf, candidates, rounds, known)
                best_seconds = dense.seconds
                milliseconds[DENSE] = 1e3 * dense.seconds
                for format, timing in zip(candidates, timings, strict=True):
                    milliseconds[str(format)] = 1e3 * timing.seconds
                    if timing.gain >= _LEAST_GAIN and timing.seconds < best_seconds:
                        best, best_seconds = format, timing.seconds
            layers[name] = _layer(leaf, matrices[name], best, candidates, refused, milliseconds)
    return layers


def asked_layers(products: Products, matrices: Matrices, setting: Any) -> Layers:
    """The formats that a setting names; leaves that it does not name stay dense.

    Args:
      products: of the model.
      matrices: by name of the leaf.
      setting: one format for all leaves that it suits, or a mapping from names or globs to formats. A leaf takes the
        format of the first name that matches it.

    Raises:
      ValueError: a name matches no leaf, or there is no such format, or a format cannot run a leaf that is named, or it
        suits no leaf.
    """
    rules = setting if isinstance(setting, Mapping) else {'*': setting}
    asked = [formats.parse(text) for text in rules.values()]
    if not matrices:
        raise ValueError(
            f'formats={setting!r}: no leaf of this model is a matrix that data are multiplied by: '
            f'{_listed(products.refused)}; run it without sparse.compile'
        )
    paths = {name: products.by_leaf[name].path for name in matrices}
    paths |= {name: tuple(name.split('/')) for name in products.refused}
    numbers = tree_lib.first_matches(list(rules), list(paths.values()), 'formats')
    layers, refused = {}, {}
    for name, number in zip(matrices, numbers, strict=False):
        format, leaf, reasons = None, products.by_leaf[name], {}
        own = None if number is None else asked[number]
        try:
            format = formats.resolve(own, leaf, matrices[name] != 0)
        except UnsuitableFormatError as error:
            refused[name] = str(error)
            reasons = {str(own): str(error)}
        candidates = {} if format is None else {format: format.pack(matrices[name], leaf)}
        layers[name] = _layer(leaf, matrices[name], format, candidates, reasons)
    # A name for a format may match only leaves that are no matrices.
    for rule, format in zip(rules, asked, strict=True):
        matched = [name for name, path in paths.items() if tree_lib.matches(rule, path)]
        if format is not None and all(name in products.refused for name in matched):
            refused |= {name: products.refused[name] for name in matched}
    if refused and (isinstance(setting, Mapping) or len(refused) == len(matrices)):
        raise ValueError(
            f"formats={setting!r} cannot be met: {_listed(refused)}; name 'dense' for these leaves"
        )
    return layers


def dense_layers(products: Products, matrices: Matrices) -> Layers:
    """All leaves dense."""
    return {name: _layer(products.by_leaf[name], matrices[name]) for name in matrices}


def _layer(
    leaf: MatrixLeaf,
    matrices: np.ndarray,
    format: ExecutedFormat | None = None,
    candidates: Candidates | None = None,
    not_measured: Mapping[str, str] | None = None,
    milliseconds: Mapping[str, float] | None = None,
) -> LayerExecution:
    """The row of a report for a leaf in a format, `None` for dense."""
    nonzero, not_measured = matrices != 0, dict(not_measured or {})
    sizes = {DENSE: math.prod(leaf.shape) * leaf.dtype.itemsize}
    for candidate, arrays in (candidates or {}).items():
        sizes[str(candidate)] = sum(array.nbytes for array in arrays.values())
    pattern = formats.n_by_m(nonzero)
    if format is None and pattern:
        not_measured[pattern] = _NO_N_BY_M
    return LayerExecution(
        op=leaf.op,
        shape=(*leaf.layers, leaf.inputs, leaf.outputs),
        density=float(nonzero.mean()) if nonzero.size else 0.0,
        format=DENSE if format is None else str(format),
        milliseconds=milliseconds or {},
        bytes=sizes,
        not_measured=not_measured,
    )


def _listed(reasons: Mapping[str, str]) -> str:
    """Leaves with their reasons, in a message."""
    texts = [f'{name}: {reason}' for name, reason in reasons.items()]
    more = [f'and {len(texts) - _MOST_LISTED} more'] if len(texts) > _MOST_LISTED else []
    return '; '.join(texts[:_MOST_LISTED] + more)


def _times(
    leaf: MatrixLeaf,
    candidates: Candidates,
    rounds: int,
    known: dict[Hashable, list[Timing]],
) -> list[Timing]:
    """The times of the dense product, then of each candidate, added up over product sites and trips of loops.

    Timings are remembered in `known`.
    """
    totals = [Timing(0.0, math.inf)] * (1 + len(candidates))
    # About as much of a layer, stored in the same formats.
    buckets = []
    for format, arrays in candidates.items():
        sizes = [max(array[0].size, 1) for array in arrays.values()]
        buckets.append((format, *[round(math.log(size, _BUCKET)) for size in sizes]))
    for site in leaf.product_sites:
        avals = [str(variable.aval) for variable in site.equation.invars]
        key = str(site.equation.params), *avals, site.operand, site.part is None, *buckets
        if key not in known:
            known[key] = _measured(site, leaf, candidates, rounds)
        for number, timing in enumerate(known[key]):
            seconds, gain = totals[number]
            seconds += site.trips * timing.seconds
            totals[number] = Timing(seconds, min(gain, timing.gain))
    return totals


def _measured(
    site: ProductSite, leaf: MatrixLeaf, candidates: Candidates, rounds: int
) -> list[Timing]:
    """Times a product, dense and in each format."""
    rng, operands = np.random.default_rng(0), []
    for number in (1 - site.operand, site.operand):
        aval = site.equation.invars[number].aval
        drawn = rng.standard_normal(aval.shape, np.float32)
        operands.append(jnp.asarray(drawn.astype(aval.dtype)))

    def call(function: Callable[..., Any], *operands: Any) -> Call:
        run = jax.jit(function)
        return lambda: run(*operands)

    def dense(data: jax.Array, weights: jax.Array) -> Any:
        return bind(site.equation, site.operands(data, weights))

    calls = [call(dense, *operands)]
    # The first trip of the loops around a product gets these arrays.
    first = (0,) * len(site.use.site.view.stack)
    for format, arrays in candidates.items():

        def in_format(data: jax.Array, arrays: Any, format: ExecutedFormat = format) -> Any:
            return site.multiply(data, format.operator(arrays, leaf))

        layer = {}
        for key, array in arrays.items():
            layer[key] = jnp.asarray(array.reshape(*leaf.layers, *array.shape[1:])[first])
        calls.append(call(in_format, operands[0], layer))
    seconds = in_turns(calls, [repeats_of(call, _LONG_ENOUGH) for call in calls], rounds)
    timings = []
    for mine in seconds:
        gains = [dense / own for dense, own in zip(seconds[0], mine, strict=True)]
        timings.append(Timing(statistics.median(mine), statistics.quantiles(gains, n=4)[0]))
    return timings
