"""Predicts how long a call takes with products in other formats, from single products and a model with empty ones.

A product that is timed alone takes longer than inside a model. The program is handed over, threads wake up, and rows
are transposed, while inside a model they may stay transposed from layer to layer. An empty product takes all this time,
too: it reads and writes in the same way, and multiplies next to nothing. The difference of the two is the time of the
product itself.

Inside a model the caches hold other data, so products take longer or shorter there than alone. The factor is measured
with dense products, and taken to be the same for other formats:

    call   = empty + factor · Σ alone
    factor = (dense - empty_dense) / Σ dense_alone

    dense         a call of the model with dense products
    empty_dense   a call with empty products in their place
    empty         a call with empty products that read and write as the other formats do
    dense_alone   the dense product alone, less the empty one; summed over products in other formats
    alone         the product alone in its format, less the empty one; summed over the same products
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution.empty_operators import EmptyDense
from jaxpruner.sparse.execution.executed_formats import table
from jaxpruner.sparse.execution.executed_formats.table import DENSE
from jaxpruner.sparse.execution.packed_models import Model
from jaxpruner.sparse.execution.report import LayerExecution
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.structure.choosing.call_times import Call

Layers = Mapping[str, LayerExecution]

_LEAST = 1e-6  # milliseconds; noise can make a difference of times zero


def empty_call(
    model: Model,
    params: tree_lib.PyTree,
    layer_formats: Mapping[str, str],
    sample: tuple[Any, ...],
) -> Call:
    """A call of a model in which some products are empty.

    Args:
      model: the model.
      params: of the whole model.
      layer_formats: name of a leaf -> the format in which its products read and write.
      sample: inputs.
    """
    products = model.products
    operators = {}
    for name, text in layer_formats.items():
        operators[name] = _empty(text, products.by_leaf[name])
    weights = products.put(model.shrink(params), operators)
    run = jax.jit(products.apply)
    return lambda: run(weights, *sample)


def _empty(text: str, matrix_leaf: MatrixLeaf) -> Any:
    format = table.parse(text)
    if format is None:
        return EmptyDense(matrix_leaf.outputs)
    return format.empty(matrix_leaf)


def predicted_milliseconds(dense: float, empty_dense: float, empty: float, layers: Layers) -> float:
    """The milliseconds of a call of the model with products in other formats.

    Args:
      dense: milliseconds of a call with dense products.
      empty_dense: with empty products in their place.
      empty: with empty products that read and write in the other formats.
      layers: name -> times of a product; at least one is in another format.
    """
    dense_alone = alone = 0.0
    for layer in layers.values():
        if layer.format != DENSE:
            dense_alone += layer.product_milliseconds(DENSE)
            alone += layer.product_milliseconds(layer.format)
    dense_in_model = max(dense - empty_dense, _LEAST)
    factor = dense_in_model / max(dense_alone, _LEAST)
    return empty + factor * max(alone, _LEAST)
