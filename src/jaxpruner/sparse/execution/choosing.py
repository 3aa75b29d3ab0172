"""Chooses the format of each product: as was asked, or the fastest by measurement."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse.execution.executed_formats import base, table
from jaxpruner.sparse.execution.executed_formats.base import ExecutedFormat, PackedArrays
from jaxpruner.sparse.execution.executed_formats.table import DENSE
from jaxpruner.sparse.execution.measuring import Candidate, Measurements
from jaxpruner.sparse.execution.report import LayerExecution
from jaxpruner.sparse.execution.zero_patterns import ZeroPattern
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf

_MOST_LISTED = 8  # leaves in a message
# What a setting may ask for beside formats.
MEASURE = 'measure'
CHANNELS = 'channels'
# How many times as fast as dense a format has to be, in three rounds of four.
_LEAST_GAIN = 1.05
# Small products are not measured if together they have less than this share of all multiplications: many models have a
# lot of them.
_NEGLIGIBLE_SHARE = 0.01
_NEGLIGIBLE = {
    'another format': f'such products are less than {_NEGLIGIBLE_SHARE:.0%} of all together'
}
_NO_N_BY_M = 'neither JAX nor jaxpruner has a kernel that makes it faster, on any device'


class Matrices(NamedTuple):
    """The matrices of a leaf.

    Attributes:
      matrix_leaf: how the model uses the leaf.
      values: [layers, inputs, outputs].
      pattern: where they are not zero.
    """

    matrix_leaf: MatrixLeaf
    values: np.ndarray
    pattern: ZeroPattern

    @classmethod
    def of(cls, matrix_leaf: MatrixLeaf, leaf: Any) -> 'Matrices':
        """The matrices of a leaf of the parameters."""
        values = np.asarray(matrix_leaf.to_matrix(leaf))
        values = values.reshape(-1, matrix_leaf.inputs, matrix_leaf.outputs)
        return cls(matrix_leaf, values, ZeroPattern.of(values))

    def pack(self, format: ExecutedFormat) -> PackedArrays:
        """The arrays that a format stores."""
        return format.pack(self.values, self.matrix_leaf)

    def layer(
        self,
        format: ExecutedFormat | None,
        *,
        milliseconds: Mapping[str, float] | None = None,
        sizes: Mapping[str, int] | None = None,
        not_measured: Mapping[str, str] | None = None,
    ) -> LayerExecution:
        """The row of a report. If the size of the format is missing, it is computed.

        Args:
          format: that was chosen; `None` for dense.
          milliseconds: as in `LayerExecution`.
          sizes: `LayerExecution.bytes`.
          not_measured: as in `LayerExecution`.
        """
        matrix_leaf = self.matrix_leaf
        name = DENSE if format is None else str(format)
        all_sizes = {
            DENSE: math.prod(matrix_leaf.shape) * matrix_leaf.dtype.itemsize,
            **(sizes or {}),
        }
        if format is not None and name not in all_sizes:
            all_sizes[name] = table.size_in_bytes(self.pack(format))
        not_measured = dict(not_measured or {})
        if format is None and self.pattern.n_by_m:
            not_measured[self.pattern.n_by_m] = _NO_N_BY_M
        return LayerExecution(
            op=matrix_leaf.op,
            shape=(*matrix_leaf.layers, matrix_leaf.inputs, matrix_leaf.outputs),
            density=self.pattern.density,
            format=name,
            milliseconds=milliseconds or {},
            bytes=all_sizes,
            not_measured=not_measured,
        )


def measured_layers(
    matrices: Mapping[str, Matrices], rounds: int, progress: bool
) -> dict[str, LayerExecution]:
    """The fastest format of each leaf; dense unless another is faster beyond noise."""
    measurements = Measurements(rounds)
    negligible = _negligible(matrices)
    layers = {}
    with progress_bar(len(matrices), progress) as show:
        for number, (name, each) in enumerate(matrices.items()):
            show(name, number)
            if name in negligible:
                layers[name] = each.layer(None, not_measured=_NEGLIGIBLE)
            else:
                layers[name] = _fastest(each, measurements)
    return layers


def _negligible(matrices: Mapping[str, Matrices]) -> set[str]:
    """The leaves with the smallest products, which together are a small share of all."""
    work = {name: each.matrix_leaf.multiplications for name, each in matrices.items()}
    left = _NEGLIGIBLE_SHARE * sum(work.values())
    names = set()
    for name in sorted(work, key=work.__getitem__):
        left -= work[name]
        if left < 0:
            break
        names.add(name)
    return names


def _fastest(matrices: Matrices, measurements: Measurements) -> LayerExecution:
    candidates, refused = table.candidates(matrices.matrix_leaf, matrices.pattern)
    if not candidates:
        return matrices.layer(None, not_measured=refused)
    packed = []
    for format in candidates:
        packed.append(Candidate(format, matrices.pack(format)))
    dense, *timings = measurements.times(matrices.matrix_leaf, packed)
    best, best_seconds = None, dense.seconds
    milliseconds = {DENSE: 1e3 * dense.seconds}
    sizes = {}
    for candidate, timing in zip(packed, timings, strict=True):
        name = str(candidate.format)
        milliseconds[name] = 1e3 * timing.seconds
        sizes[name] = table.size_in_bytes(candidate.arrays)
        if timing.gain >= _LEAST_GAIN and timing.seconds < best_seconds:
            best, best_seconds = candidate.format, timing.seconds
    return matrices.layer(best, milliseconds=milliseconds, sizes=sizes, not_measured=refused)


def asked_layers(
    matrices: Mapping[str, Matrices], dense_leaves: Mapping[str, str], setting: Any
) -> dict[str, LayerExecution]:
    """The formats that a setting names; leaves that it does not name stay dense.

    Args:
      matrices: by name of the leaf.
      dense_leaves: name of each other leaf -> why it is no matrix.
      setting: one format for all leaves that it suits, or a mapping from names or globs to formats. A leaf takes the
        format of the first name that matches it.

    Raises:
      ValueError: a name matches no leaf, or there is no such format, or a format cannot run a leaf that is named, or it
        suits no leaf.
    """
    is_mapping = isinstance(setting, Mapping)
    rules = setting if is_mapping else {'*': setting}
    for text in rules.values():
        table.check_known(text)
    if not matrices:
        raise ValueError(
            f'formats={setting!r}: no leaf of this model is a matrix that data are multiplied by: '
            f'{_listed(dense_leaves)}; run it without sparse.compile'
        )
    paths = {name: each.matrix_leaf.path for name, each in matrices.items()}
    dense_paths = {name: tuple(name.split('/')) for name in dense_leaves}
    rule_of = _first_rules(rules, {**paths, **dense_paths})
    layers: dict[str, LayerExecution] = {}
    refused: dict[str, str] = {}
    for name, each in matrices.items():
        text = rule_of.get(name, DENSE)
        try:
            format = table.resolve(text, each.matrix_leaf, each.pattern)
        except base.UnsuitableFormatError as error:
            reason = str(error)
            refused[name] = reason
            layers[name] = each.layer(None, not_measured={text: reason})
        else:
            layers[name] = each.layer(format)
    if is_mapping:
        for name in _named_in_vain(rules, paths, dense_paths):
            refused[name] = dense_leaves[name]
    if refused and (is_mapping or len(refused) == len(matrices)):
        raise ValueError(
            f"formats={setting!r} cannot be met: {_listed(refused)}; name 'dense' for these leaves"
        )
    return layers


def _first_rules(rules: Mapping[Any, Any], paths: Mapping[str, tree_lib.Path]) -> dict[str, Any]:
    """For each leaf, the value of the first rule that matches it."""
    texts = list(rules.values())
    all_paths = list(paths.values())
    numbers = tree_lib.first_matches(list(rules), all_paths, 'formats')
    rule_of = {}
    for name, number in zip(paths, numbers, strict=True):
        if number is not None:
            rule_of[name] = texts[number]
    return rule_of


def _named_in_vain(
    rules: Mapping[Any, Any],
    paths: Mapping[str, tree_lib.Path],
    dense_paths: Mapping[str, tree_lib.Path],
) -> list[str]:
    """Leaves that a rule names for a format, although none of the leaves that it matches is a matrix."""
    names = []
    for rule, text in rules.items():
        names_a_matrix = any(tree_lib.matches(rule, path) for path in paths.values())
        if text == DENSE or names_a_matrix:
            continue
        for name, path in dense_paths.items():
            if tree_lib.matches(rule, path):
                names.append(name)
    return names


def _listed(reasons: Mapping[str, str]) -> str:
    """Leaves with their reasons, in a message."""
    texts = [f'{name}: {reason}' for name, reason in reasons.items()]
    more = [f'and {len(texts) - _MOST_LISTED} more'] if len(texts) > _MOST_LISTED else []
    return '; '.join(texts[:_MOST_LISTED] + more)
