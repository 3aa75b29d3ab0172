"""Which equations of a program have a part in its results: what is traced and thrown away is no use of a parameter."""

import functools
from typing import Any, NamedTuple

from jaxpruner.uses import bodies

# A callback that only shows something changes no result.
_SHOWS = frozenset({'debug_callback', 'debug_print'})

Wanted = tuple[bool, ...]


class Live(NamedTuple):
    """What a program needs for the results that are wanted.

    Attributes:
      inputs: for each input whether it has a part in them.
      results: for each equation, which of its results do; all False where it can be left out.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, y * 2))(1.0, 1.0).jaxpr
    >>> live(jaxpr, (True, False))
    Live(inputs=(True, False), results=((True,), (False,)))
    """

    inputs: Wanted
    results: tuple[Wanted, ...]


@functools.lru_cache(4096)
def live(jaxpr: Any, wanted: Wanted) -> Live:
    """What a program needs for some of its results.

    Args:
      jaxpr: the program.
      wanted: for each result whether it is wanted.

    >>> import jax
    >>> live(jax.make_jaxpr(lambda x, y: x)(1.0, 1.0).jaxpr, (True,)).inputs
    (True, False)
    """
    needed = {
        _key(variable)
        for variable, is_wanted in zip(jaxpr.outvars, wanted, strict=True)
        if is_wanted
    }
    results = []
    for equation in reversed(jaxpr.eqns):
        wanted_here = tuple(_key(variable) in needed for variable in equation.outvars)
        acts = bool(equation.effects) and equation.primitive.name not in _SHOWS
        results.append(wanted_here)
        if any(wanted_here) or acts:
            if acts:
                results[-1] = wanted_here = (True,) * len(wanted_here)
            inputs = _inputs(equation, wanted_here)
            needed |= {
                _key(variable)
                for variable, part in zip(equation.invars, inputs, strict=True)
                if part
            }
    return Live(
        tuple(_key(variable) in needed for variable in jaxpr.invars), tuple(reversed(results))
    )


def _key(variable: Any) -> int:
    # Literals are not hashable in some versions; a literal's number is never asked for again.
    return id(variable)


def _inputs(equation: Any, wanted: Wanted) -> Wanted:
    """Which operands have a part in the wanted results of an equation."""
    name = equation.primitive.name
    if name in bodies.CALLS:
        return live(bodies.called(equation).jaxpr, wanted).inputs
    if name == 'scan':
        scan = bodies.Scan.of(equation)
        if not scan.length:  # what is carried goes through, and nothing else does
            after = len(equation.invars) - scan.constants - scan.carried
            return (*(False,) * scan.constants, *wanted[: scan.carried], *(False,) * after)
        inputs = live(scan.body.jaxpr, wanted_of_scan(equation, wanted)).inputs
        _, carried, sliced = scan.split(list(inputs))
        # What is carried out without having gone through the body is the operand itself.
        carried = [a or b for a, b in zip(carried, wanted[: scan.carried], strict=True)]
        return (*inputs[: scan.constants], *carried, *sliced)
    if name == 'while':
        loop = bodies.While.of(equation)
        carried = wanted_of_while(equation, wanted)
        condition = live(loop.condition.jaxpr, (True,)).inputs[: loop.condition_constants]
        return (*condition, *live(loop.body.jaxpr, carried).inputs[: loop.body_constants], *carried)
    if name == 'cond':
        each = [live(branch.jaxpr, wanted).inputs for branch in bodies.branches(equation)]
        return (True, *map(any, zip(*each, strict=True)))
    return (True,) * len(equation.invars)


def wanted_of_scan(equation: Any, wanted: Wanted) -> Wanted:
    """Which results of a scan's body are needed for some results of the scan.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c * 2, c + 1), x, None, 3)[1])(1.0).jaxpr
    >>> wanted_of_scan(jaxpr.eqns[0], (False, True))
    (True, True)
    """
    scan = bodies.Scan.of(equation)
    while True:
        inputs = live(scan.body.jaxpr, wanted).inputs
        carried = scan.split(list(inputs))[1]
        after = (*(a or b for a, b in zip(wanted, carried, strict=False)), *wanted[scan.carried :])
        if after == wanted:
            return wanted
        wanted = after


def wanted_of_while(equation: Any, wanted: Wanted) -> Wanted:
    """Which results of a while loop's body are needed for some results of the loop.

    >>> import jax
    >>> loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]
    >>> wanted_of_while(jax.make_jaxpr(loop)(1.0).jaxpr.eqns[0], (False, True))
    (True, True)
    """
    loop = bodies.While.of(equation)
    condition = live(loop.condition.jaxpr, (True,)).inputs[loop.condition_constants :]
    wanted = tuple(a or b for a, b in zip(wanted, condition, strict=True))
    while True:
        carried = live(loop.body.jaxpr, wanted).inputs[loop.body_constants :]
        after = tuple(a or b for a, b in zip(wanted, carried, strict=True))
        if after == wanted:
            return wanted
        wanted = after
