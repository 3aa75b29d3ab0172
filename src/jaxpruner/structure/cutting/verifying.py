"""Compares the smaller model with the zeroed one, the whole model whose removed channels are zero."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.cutting.small_model import SmallApply

Verdict = Literal['equal', 'different', 'unproven']


@dataclasses.dataclass(frozen=True)
class Verification:
    """How a smaller model compares with the zeroed one, the whole model whose removed channels are zero.

    Attributes:
      error: the largest difference between elements of their results.
      change: the largest difference that zeroing makes in the whole model's results.
      tolerance: the relative error up to which they count as equal.
      rounding: the largest error that rounding explains.

    >>> print(Verification(error=1e-9, change=0.5, tolerance=1e-3, rounding=1e-6))
    equal: the error is 2e-09 of the change of 0.5 that the removal makes
    >>> print(Verification(error=0.0, change=0.0, tolerance=1e-3, rounding=1e-6))
    unproven: the removal changes the results by 0, and rounding explains up to 1e-06
    """

    error: float
    change: float
    tolerance: float
    rounding: float

    @property
    def relative_error(self) -> float:
        """The error over the change; infinite if there is no change."""
        return self.error / self.change if self.change else float('inf')

    @property
    def verdict(self) -> Verdict:
        """`'equal'` if the error is a small part of the change; else `'unproven'` if the error may be rounding."""
        if self.change > 0 and self.relative_error <= self.tolerance:
            return 'equal'
        return 'unproven' if self.error <= self.rounding else 'different'

    def __str__(self) -> str:
        if self.verdict == 'unproven':
            return (
                f'unproven: the removal changes the results by {self.change:.3g}, and rounding explains up to '
                f'{self.rounding:.3g}'
            )
        return (
            f'{self.verdict}: the error is {self.relative_error:.3g} of the change of {self.change:.3g} that the '
            'removal makes'
        )


def compare(
    whole: Sequence[Any], zeroed: Sequence[Any], small: Sequence[Any], precision: float = 0.0
) -> Verification:
    """Compares the results of the whole model, of the zeroed one, and of the smaller one.

    The bound for rounding allows a thousand operations on the largest element. They are in the coarsest dtype of the
    results or of the program, whose precision is given.
    """
    error = max(map(_distance, zeroed, small), default=0.0)
    change = max(map(_distance, whole, zeroed), default=0.0)
    coarsest = precision
    largest = 0.0
    for result in zeroed:
        if jnp.issubdtype(result.dtype, jnp.inexact):
            coarsest = max(coarsest, _precision(result.dtype))
            largest = max(largest, _largest(_doubles(result)))
    tolerance = coarsest**0.5
    rounding = 1000 * coarsest * largest
    return Verification(error, change, tolerance, rounding)


def coarsest_precision(jaxpr: Any) -> float:
    """The relative precision of the coarsest floating dtype in which a program computes."""
    coarsest = 0.0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, 'dtype', None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                coarsest = max(coarsest, _precision(dtype))
        parameters = list(equation.params.values())
        for parameter in jax.tree.leaves(parameters):
            inner = getattr(parameter, 'jaxpr', parameter)
            if hasattr(inner, 'eqns'):
                coarsest = max(coarsest, coarsest_precision(inner))
    return coarsest


def _precision(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _doubles(array: Any) -> np.ndarray:
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    dtype = np.complex128 if is_complex else np.float64
    return np.asarray(array).astype(dtype)


def _largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def _distance(first: Any, second: Any) -> float:
    """The largest difference of two elements; infinite if only one of them is finite."""
    first, second = _doubles(first), _doubles(second)
    both_nan = np.isnan(first) & np.isnan(second)
    is_same = (first == second) | both_nan
    with np.errstate(invalid='ignore'):
        differences = np.where(is_same, 0, np.abs(first - second))
    finite_or_infinite = np.nan_to_num(differences, nan=np.inf, posinf=np.inf)
    return float(finite_or_infinite.max(initial=0.0))


class Versions(NamedTuple):
    """The arguments of the whole model: unchanged, with zeros at removed channels, and cut."""

    whole: Sequence[Any]
    zeroed: Sequence[Any]
    small: Sequence[Any]


def verify(
    apply_fn: Callable[..., Any], small_apply: SmallApply, versions: Versions
) -> Verification:
    """Runs the whole model twice, and the smaller one."""
    run_whole = jax.jit(apply_fn)
    run_small = jax.jit(small_apply)
    whole = small_apply.cut_results(run_whole(*versions.whole))
    zeroed = small_apply.cut_results(run_whole(*versions.zeroed))
    small = jax.tree.leaves(run_small(*versions.small))
    precision = coarsest_precision(small_apply.program)
    return compare(whole, zeroed, small, precision)
