"""What is checked before and after a model is compiled: settings, values, devices, and results."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.program.models import Products

# Differences up to these shares of the largest result count as rounding. GPUs and TPUs round products of float32 to
# fewer bits by default, and errors grow from layer to layer.
_TOLERANCES = {'float64': 1e-6, 'float32': 1e-2, 'float16': 0.05, 'bfloat16': 0.1}
_TOLERANCE_OF_NARROW_FLOATS = 0.3


def check_rounds(rounds: Any) -> None:
    """Refuses a number of rounds that is too small for quartiles.

    Raises:
      TypeError: it is no whole number.
      ValueError: it is below 2.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f'rounds must be a whole number, got {rounds!r}')
    if rounds < 2:
        raise ValueError(
            f'rounds must be at least 2, got {rounds}; one timing says nothing of noise'
        )


def check_arrays(name: str, tree: tree_lib.PyTree) -> None:
    """Refuses arrays without values.

    Raises:
      TypeError: a leaf is a shape, or traced.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) or tree_lib.is_traced(leaf):
            raise TypeError(f'{name} must be arrays with values, outside of jit; got {leaf}')


def warn_of_several_devices(leaves: Mapping[str, Any]) -> None:
    """Warns of matrices that lie on several devices: packed matrices lie on one."""
    spread = []
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            spread.append(name)
    if spread:
        caller_warnings.warn(
            f'compile: {", ".join(spread)} lie on several devices, and a compiled model runs on one: packed matrices '
            'are gathered there. Keep the dense model where it does not fit, or train it with block_sparse'
        )


def check_results(found: Any, expected: Any, products: Products) -> None:
    """Refuses a compiled model whose results differ from those of the dense one by more than rounding.

    Differences are relative to the largest of all results. Results that are infinite or no numbers are not compared.
    Whole numbers are compared only if the model computes with whole numbers alone: otherwise they follow from floats,
    and may change if two floats are about equal.

    Args:
      found: results of the compiled model.
      expected: of the dense model.
      products: of the dense model.

    Raises:
      RuntimeError: they differ.
    """
    tolerance = _tolerance_of(products, expected)
    scale = 0.0
    differences = {}
    expected_results = jax.tree_util.tree_leaves_with_path(expected)
    results = jax.tree.leaves(found)
    for (path, dense_result), result in zip(expected_results, results, strict=True):
        if not _is_compared(dense_result, tolerance):
            continue
        is_finite = jnp.isfinite(dense_result)
        of_dense = _wide(dense_result)
        difference = _wide(result) - of_dense
        name = jax.tree_util.keystr(path)
        differences[name] = _largest_magnitude(difference, is_finite)
        scale = max(scale, _largest_magnitude(of_dense, is_finite))
    for name, difference in differences.items():
        if not difference <= tolerance * scale:  # NaN is not
            raise RuntimeError(
                f'compile: the result{name} of the compiled model differs by {difference:.3g} from that of the dense '
                f'model, whose largest result is {scale:.3g}; rounding explains up to {tolerance * scale:.3g}. Keep '
                "the model dense (formats='dense'); or, if its results jump where floats hardly differ, name formats, "
                'since then nothing is compared'
            )


def _tolerance_of(products: Products, results: Any) -> float:
    """The tolerance for the coarsest floats of products and results; 0 if all are whole numbers."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(results)]
    for matrix_leaf in products.by_leaf.values():
        dtypes += [matrix_leaf.computed_dtype, matrix_leaf.result_dtype]
    tolerance = 0.0
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jnp.inexact):
            name = jnp.finfo(dtype).dtype.name
            tolerance = max(tolerance, _TOLERANCES.get(name, _TOLERANCE_OF_NARROW_FLOATS))
    return tolerance


def _is_compared(result: jax.Array, tolerance: float) -> bool:
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return True
    return jnp.issubdtype(result.dtype, jnp.integer) and not tolerance


def _wide(result: jax.Array) -> jax.Array:
    """Casts a result to float32 or wider, so that differences can be taken."""
    dtype = tree_lib.at_least_float32(result.dtype)
    return result.astype(dtype)


def _largest_magnitude(values: jax.Array, is_counted: jax.Array) -> float:
    magnitudes = jnp.where(is_counted, jnp.abs(values), 0)
    return float(magnitudes.max(initial=0))
