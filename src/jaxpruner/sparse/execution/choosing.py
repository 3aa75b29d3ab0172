"""Which format each product runs in: as was asked, as was chosen before, or the fastest by measurement."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.progress import progress_bar
from jaxpruner.sparse.execution import formats
from jaxpruner.sparse.execution.formats import Arrays, Format
from jaxpruner.sparse.execution.measuring import Candidate, Measurements
from jaxpruner.sparse.execution.patterns import Pattern
from jaxpruner.sparse.execution.report import DENSE, LayerExecution
from jaxpruner.sparse.program.matrices import Product

# A format has to be so much faster than dense in three rounds of four.
_LEAST_GAIN = 1.05
# Of all multiplications. Products that together are less are not measured: many models have a lot of them.
_NEGLIGIBLE_SHARE = 0.01
_NEGLIGIBLE = {
    'another format': f'such products are less than {_NEGLIGIBLE_SHARE:.0%} of all together'
}


class Matrices(NamedTuple):
    """The matrices of a leaf.

    Attributes:
      product: what they are to the model.
      values: [layers, inputs, outputs].
      pattern: where they are not zero.
    """

    product: Product
    values: np.ndarray
    pattern: Pattern

    @classmethod
    def of(cls, product: Product, leaf: Any) -> 'Matrices':
        """Of a leaf of the parameters."""
        values = np.asarray(product.to_matrix(leaf))
        values = values.reshape(-1, *values.shape[-2:])
        return cls(product, values, Pattern.of(values))

    def pack(self, format: Format) -> Arrays:
        """What a format stores."""
        return format.pack(self.values, self.product)

    def layer(self, format: Format | None, **measured: Any) -> LayerExecution:
        """The row of a report."""
        product = self.product
        name = DENSE if format is None else str(format)
        settings: dict[str, Any] = {'milliseconds': {}, 'bytes': {}, 'not_measured': {}}
        settings |= measured
        sizes = {DENSE: math.prod(product.shape) * product.dtype.itemsize, **settings['bytes']}
        if format is not None and name not in sizes:
            sizes[name] = formats.size_in_bytes(self.pack(format))
        settings['bytes'] = sizes
        shape = (*product.layers, product.inputs, product.outputs)
        return LayerExecution(product.op, shape, self.pattern.density, name, **settings)


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
    work = {name: each.product.multiplications for name, each in matrices.items()}
    left = _NEGLIGIBLE_SHARE * sum(work.values())
    names = set()
    for name in sorted(work, key=work.__getitem__):
        left -= work[name]
        if left < 0:
            break
        names.add(name)
    return names


def _fastest(matrices: Matrices, measurements: Measurements) -> LayerExecution:
    candidates, refused = formats.candidates(matrices.product, matrices.pattern)
    if not candidates:
        return matrices.layer(None, not_measured=refused)
    packed = []
    for format in candidates:
        packed.append(Candidate(format, matrices.pack(format)))
    dense, *timings = measurements.times(matrices.product, packed)
    best, best_seconds = None, dense.seconds
    milliseconds = {DENSE: 1e3 * dense.seconds}
    empty_milliseconds = {DENSE: 1e3 * dense.empty}
    sizes = {}
    for candidate, timing in zip(packed, timings, strict=True):
        name = str(candidate.format)
        milliseconds[name] = 1e3 * timing.seconds
        empty_milliseconds[name] = 1e3 * timing.empty
        sizes[name] = formats.size_in_bytes(candidate.arrays)
        if timing.gain >= _LEAST_GAIN and timing.seconds < best_seconds:
            best, best_seconds = candidate.format, timing.seconds
    return matrices.layer(
        best,
        milliseconds=milliseconds,
        bytes=sizes,
        not_measured=refused,
        empty_milliseconds=empty_milliseconds,
    )


def asked_layers(matrices: Mapping[str, Matrices], setting: Any) -> dict[str, LayerExecution]:
    """The formats that a setting names; leaves that it does not name stay dense.

    Args:
      matrices: by name of the leaf.
      setting: a mapping from names or globs to formats, of which each leaf takes the first that matches it, or one
        format for all leaves that it suits.

    Raises:
      ValueError: a name matches no leaf, there is no such format, it cannot run a leaf that is named, or suits no leaf.
    """
    is_mapping = isinstance(setting, Mapping)
    rules = setting if is_mapping else {'*': setting}
    texts = list(rules.values())
    for text in texts:
        if text != formats.ANY_BLOCKS:
            formats.parse(text)
    if not matrices:
        raise ValueError(
            f'formats={setting!r}: no leaf of this model is a matrix that data are multiplied by'
        )
    paths = [each.product.path for each in matrices.values()]
    numbers = tree_lib.first_matches(list(rules), paths, 'formats')
    layers: dict[str, LayerExecution] = {}
    refused: dict[str, str] = {}
    for number, (name, each) in zip(numbers, matrices.items(), strict=True):
        text = DENSE if number is None else texts[number]
        try:
            layers[name] = each.layer(formats.resolve(text, each.product, each.pattern))
        except formats.UnsuitableFormatError as error:
            refused[name] = str(error)
            layers[name] = each.layer(None, not_measured={text: str(error)})
    if refused and (is_mapping or len(refused) == len(matrices)):
        reasons = '; '.join(f'{name}: {reason}' for name, reason in refused.items())
        raise ValueError(
            f"formats={setting!r} cannot be met: {reasons}; name 'dense' for these leaves"
        )
    return layers
