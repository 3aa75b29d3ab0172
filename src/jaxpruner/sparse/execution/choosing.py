"""Chooses the format of each product: as was asked, or the fastest by measurement."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse.execution import formats
from jaxpruner.sparse.execution.formats import DENSE, ExecutedFormat, UnsuitableFormatError
from jaxpruner.sparse.execution.measuring import Measurements
from jaxpruner.sparse.execution.report import LayerExecution
from jaxpruner.sparse.program.models import Products

Layers = dict[str, LayerExecution]
Matrices = Mapping[str, np.ndarray]  # [layers, inputs, outputs] by name of the leaf

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
    measurements = Measurements(rounds)
    work = {name: products.by_leaf[name].multiplications for name in matrices}
    left = _NEGLIGIBLE_SHARE * sum(work.values())
    layers = {}
    for name in sorted(work, key=work.__getitem__):
        left -= work[name]
        if left >= 0:
            layers[name] = _layer(products, matrices, name, not_measured=_NEGLIGIBLE)
    with progress_bar(len(matrices), progress) as show:
        for number, name in enumerate(matrices):
            show(name, number)
            if name in layers:
                continue
            leaf = products.by_leaf[name]
            found, refused = formats.candidates(leaf, matrices[name] != 0)
            if not found:
                layers[name] = _layer(products, matrices, name, not_measured=refused)
                continue
            candidates = {format: format.pack(matrices[name], leaf) for format in found}
            dense, *timings = measurements.times(leaf, candidates)
            best, best_seconds = None, dense.seconds
            milliseconds, sizes = {DENSE: 1e3 * dense.seconds}, {}
            for (format, arrays), timing in zip(candidates.items(), timings, strict=True):
                milliseconds[str(format)] = 1e3 * timing.seconds
                sizes[str(format)] = formats.size_in_bytes(arrays)
                if timing.gain >= _LEAST_GAIN and timing.seconds < best_seconds:
                    best, best_seconds = format, timing.seconds
            layers[name] = _layer(products, matrices, name, best, milliseconds, sizes, refused)
    return {name: layers[name] for name in matrices}


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
    texts = list(rules.values())
    for text in texts:
        formats.parse(text)
    dense_leaves = products.refused
    if not matrices:
        raise ValueError(
            f'formats={setting!r}: no leaf of this model is a matrix that data are multiplied by: '
            f'{_listed(dense_leaves)}; run it without sparse.compile'
        )
    paths = {name: products.by_leaf[name].path for name in matrices}
    dense_paths = {name: tuple(name.split('/')) for name in dense_leaves}
    numbers = tree_lib.first_matches(
        list(rules), [*paths.values(), *dense_paths.values()], 'formats'
    )
    layers, refused = {}, {}
    for name, number in zip(matrices, numbers, strict=False):
        text = DENSE if number is None else texts[number]
        try:
            format = formats.resolve(text, products.by_leaf[name], matrices[name] != 0)
        except UnsuitableFormatError as error:
            refused[name] = str(error)
            layers[name] = _layer(products, matrices, name, not_measured={text: str(error)})
        else:
            layers[name] = _layer(products, matrices, name, format)
    if isinstance(setting, Mapping):
        # A name for a format may match only leaves that are no matrices.
        for rule, text in rules.items():
            if text != DENSE and not any(tree_lib.matches(rule, path) for path in paths.values()):
                for name, path in dense_paths.items():
                    if tree_lib.matches(rule, path):
                        refused[name] = dense_leaves[name]
    if refused and (isinstance(setting, Mapping) or len(refused) == len(matrices)):
        raise ValueError(
            f"formats={setting!r} cannot be met: {_listed(refused)}; name 'dense' for these leaves"
        )
    return layers


def dense_layers(products: Products, matrices: Matrices) -> Layers:
    """All leaves dense."""
    return {name: _layer(products, matrices, name) for name in matrices}


def _layer(
    products: Products,
    matrices: Matrices,
    name: str,
    format: ExecutedFormat | None = None,
    milliseconds: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
    not_measured: Mapping[str, str] | None = None,
) -> LayerExecution:
    """The row of a report for a leaf in a format, `None` for dense."""
    leaf, nonzero = products.by_leaf[name], matrices[name] != 0
    sizes = {DENSE: math.prod(leaf.shape) * leaf.dtype.itemsize, **(sizes or {})}
    if format is not None and str(format) not in sizes:
        sizes[str(format)] = formats.size_in_bytes(format.pack(matrices[name], leaf))
    not_measured = dict(not_measured or {})
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
