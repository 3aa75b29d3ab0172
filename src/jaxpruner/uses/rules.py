"""What each primitive does to views: a table from its name to a rule.

A rule gets the equation and the views of each operand, none of which depends on data, and returns the views of each
result. What has no rule here makes its parameters opaque.
"""

from collections.abc import Sequence
from typing import Any

from jaxpruner.uses import constant_rules, contractions, indexing_rules, moves, views
from jaxpruner.uses.moving_rules import MOVING, Rule, Views, shape_of
from jaxpruner.uses.records import Value
from jaxpruner.uses.views import NoRuleError

# One result, each element of it from the elements of the operands at the same place.
ARITHMETIC = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
    le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg nextafter not or population_count pow real rem
    round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)
_COLLECTIVES = frozenset('pmax pmin ppermute psum psum2 psum_invariant'.split())
ELEMENTWISE = ARITHMETIC | _COLLECTIVES | {'select_n'}
_REDUCTIONS = frozenset(
    'argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor'.split()
)
_ALONG_AN_AXIS = frozenset('cumlogsumexp cummax cummin cumprod cumsum sort'.split())


def views_of_results(equation: Any, values: Sequence[Value]) -> list[Views]:
    """The views of an equation's results, where nothing depends on data.

    Args:
      equation: of a program.
      values: its operands.

    Raises:
      NoRuleError: there is no rule for the primitive, or it does what the rule cannot follow.

    >>> import jax, jax.numpy as jnp
    >>> equation = jax.make_jaxpr(lambda w: w.T)(jnp.ones((2, 3))).eqns[0]
    >>> views_of_results(equation, [Value(views=(views.whole(0, (2, 3)),))])[0][0].region
    ((0, 3), (0, 2))
    """
    name = equation.primitive.name
    if name not in RULES:
        raise NoRuleError(f'no rule for {name}')
    operands = [value.views for value in values]
    if name in constant_rules.RULES:
        found = constant_rules.RULES[name](equation, values)
        if found is not None:
            return found
    return RULES[name](equation, operands)


def _elementwise(equation: Any, operands: Sequence[Views]) -> list[Views]:
    if len(equation.outvars) == len(operands) > 1:  # a collective over several arrays
        return [moves.joined(operand) for operand in operands]
    result, found = shape_of(equation.outvars[0]), []
    for variable, operand in zip(equation.invars, operands, strict=True):
        shape = shape_of(variable)
        # Scalars and axes of length 1 may stand among arrays.
        dimensions = range(len(result) - len(shape), len(result))
        found += [moves.broadcast(view, shape, result, dimensions) for view in operand]
    return [moves.joined(found)]


def _reduce(equation: Any, operands: Sequence[Views]) -> list[Views]:
    return [moves.joined([moves.drop(view, equation.params['axes']) for view in operands[0]])]


def _along_an_axis(equation: Any, operands: Sequence[Views]) -> list[Views]:
    axis = equation.params.get('axis', equation.params.get('dimension'))
    length = shape_of(equation.invars[0])[axis]
    every = [view for operand in operands for view in operand]
    if any(view.region[axis] != (0, length) for view in every):
        raise NoRuleError(f'no rule for {equation.primitive.name} along a concatenation')
    return [moves.joined(every)] * len(equation.outvars)


def _dot(equation: Any, operands: Sequence[Views]) -> list[Views]:
    """A contraction of two values that are computed from parameters alone."""
    contracted, batched, _ = contractions.dot_axes(equation)
    shapes = [shape_of(variable) for variable in equation.invars]
    free = [
        [i for i in range(len(shapes[k])) if i not in (*contracted[k], *batched[k])] for k in (0, 1)
    ]
    found = []
    for k, operand in enumerate(operands):
        for view in operand:
            own = [(view.axes[i], view.region[i]) for i in (*batched[k], *free[k])]
            other = [(views.copies(shapes[1 - k][i]), (0, shapes[1 - k][i])) for i in free[1 - k]]
            count = len(batched[k])
            placed = [*own, *other] if k == 0 else [*own[:count], *other, *own[count:]]
            found.append(
                views.computed(view, [axis for axis, _ in placed], [region for _, region in placed])
            )
    return [moves.joined(found)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_ALONG_AN_AXIS, _along_an_axis),
    **MOVING,
    **indexing_rules.INDEXING,
    'dot_general': _dot,
}

# What costs no more than a few operations for each element, which are not counted, and contractions, which are. Others
# may cost anything, so that they are named.
CHEAP = (
    frozenset(RULES)
    | frozenset(contractions.OPERATIONS)
    | frozenset(
        """
    addupdate all_to_all approx_top_k argsort axis_index bitcast_convert_type create_token debug_callback debug_print
    empty full_like get igamma igamma_grad_a igammac iota pcast pgather platform_index polygamma
    ragged_all_to_all random_bits random_clone random_fold_in random_gamma random_seed random_split
    random_unwrap random_wrap reduce reduce_scatter reduce_window reduce_window_max reduce_window_min
    reduce_window_sum regularized_incomplete_beta rng_bit_generator rng_uniform scatter_max scatter_min scatter_sub
    select_and_gather_add select_and_scatter select_and_scatter_add swap threefry2x32 zeta
    """.split()
    )
)
