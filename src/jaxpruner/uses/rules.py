"""What each primitive does to views: a table from its name to a rule.

A rule gets the equation and the views of each operand, none of which depends on data. It returns the views of each
result. A primitive without a rule makes its parameters opaque.

The head of `walk` says when rules are asked. CONTRIBUTING.md lists where a new primitive goes.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jaxpruner.uses import constant_rules, contractions, indexing_rules, moves, views
from jaxpruner.uses.moving_rules import MOVING, Operands, Results, Rule, shape_of
from jaxpruner.uses.records import Value, views_of
from jaxpruner.uses.views import NoRuleError

# Each element of the only result is computed from the operands' elements at the same position.
ARITHMETIC = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
    le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or
    polynomial population_count pow real rem
    round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)
_COLLECTIVES = frozenset('pmax pmin ppermute psum psum2 psum_invariant'.split())
ELEMENTWISE = ARITHMETIC | _COLLECTIVES | {'select_n'}
_REDUCTIONS = frozenset(
    'argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor'.split()
)
_ALONG_AN_AXIS = frozenset('cumlogsumexp cummax cummin cumprod cumsum sort'.split())


def views_of_results(equation: Any, values: Sequence[Value]) -> Results:
    """The views of the results of an equation without data.

    The constant rule of the primitive is asked first. If there is none, or it does not apply, the rule in `RULES` is
    asked.

    Raises:
      NoRuleError: there is no rule for the primitive, or the rule cannot follow it.
    """
    name = equation.primitive.name
    if name not in RULES:
        raise NoRuleError(f'no rule for {name}')
    if name in constant_rules.RULES:
        results = constant_rules.RULES[name](equation, values)
        if results is not None:
            return results
    return RULES[name](equation, views_of(values))


def _elementwise(equation: Any, operands: Operands) -> Results:
    if len(equation.outvars) == len(operands) > 1:  # a collective over several arrays
        return list(map(moves.join, operands))
    shape = shape_of(equation.outvars[0])
    aligned = []
    for view in itertools.chain.from_iterable(operands):
        aligned.append(moves.align(view, shape))
    return [moves.join(aligned)]


def _reduce(equation: Any, operands: Operands) -> Results:
    reduced = functools.partial(moves.drop, axes=equation.params['axes'])
    return [moves.join(map(reduced, operands[0]))]


def _along_an_axis(equation: Any, operands: Operands) -> Results:
    axis = equation.params.get('axis', equation.params.get('dimension'))
    every = list(itertools.chain.from_iterable(operands))
    for view in every:
        if not view.axes[axis].is_whole:
            raise NoRuleError(f'no rule for {equation.primitive.name} along a concatenation')
    return [moves.join(every)] * len(equation.outvars)


def _dot(equation: Any, operands: Operands) -> Results:
    """A contraction of two values that are computed only from parameters."""
    roles = [contractions.roles(equation, k) for k in (0, 1)]
    products = []
    for k, operand in enumerate(operands):
        other = 1 - k
        other_shape = shape_of(equation.invars[other])
        others = [views.copies(other_shape[i]) for i in roles[other].free]
        for view in operand:
            batch = moves.transpose(view, roles[k].batch).axes
            own = moves.transpose(view, roles[k].free).axes
            left, right = (own, others) if k == 0 else (others, own)
            products.append(view.computed([*batch, *left, *right]))
    return [moves.join(products)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_ALONG_AN_AXIS, _along_an_axis),
    **MOVING,
    **indexing_rules.INDEXING,
    'dot_general': _dot,
}

# Primitives that `UseGraph.uncounted` does not name: contractions, which are counted; arithmetic, which is counted
# where a parameter meets data; and others that cost a few operations for each element. All others may cost anything.
CHEAP = (
    frozenset(RULES)
    | frozenset(contractions.OPERATIONS)
    | frozenset(
        """
    addupdate all_to_all approx_top_k axis_index bitcast_convert_type create_token debug_callback debug_print
    empty get igamma igamma_grad_a igammac iota pgather platform_index polygamma
    ragged_all_to_all random_bits random_clone random_fold_in random_gamma random_seed random_split
    random_unwrap random_wrap reduce reduce_scatter reduce_window reduce_window_max reduce_window_min
    reduce_window_sum regularized_incomplete_beta rng_bit_generator rng_uniform
    select_and_gather_add select_and_scatter select_and_scatter_add swap threefry2x32 zeta
    """.split()
    )
)
