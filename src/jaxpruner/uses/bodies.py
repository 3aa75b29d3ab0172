"""The programs inside an equation: what `jit`, `scan`, `while` and `cond` run, and which operand goes where."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core

# Primitives that run one program on their operands. Names differ between versions of JAX.
CALLS = frozenset(
    """
    jit pjit closed_call core_call call remat remat2 checkpoint composite custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr shard_map
    """.split()
)


class Program(NamedTuple):
    """A program and the constants in it.

    >>> Program(jax.make_jaxpr(lambda x: x + 1)(2.0).jaxpr, ()).constants
    ()
    """

    jaxpr: jax.extend.core.Jaxpr
    constants: tuple[Any, ...]


def _program(jaxpr: Any) -> Program:
    if hasattr(jaxpr, 'jaxpr'):
        return Program(jaxpr.jaxpr, tuple(jaxpr.consts))
    return Program(jaxpr, ())


def called(equation: Any) -> Program:
    """The program that an equation of `CALLS` runs.

    >>> equation = jax.make_jaxpr(jax.jit(lambda x: x + 1))(2.0).eqns[0]
    >>> len(called(equation).jaxpr.eqns)
    1
    """
    keys = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
    return _program(next(equation.params[key] for key in keys if key in equation.params))


class Scan(NamedTuple):
    """A scan: its operands are constants, then what is carried, then what is sliced.

    >>> equation = jax.make_jaxpr(lambda xs: jax.lax.scan(lambda c, x: (c + x, x), 0.0, xs))(jax.numpy.ones(3)).eqns[-1]
    >>> scan = Scan.of(equation)
    >>> scan.length, scan.constants, scan.carried
    (3, 0, 1)
    """

    body: Program
    length: int
    constants: int
    carried: int

    @classmethod
    def of(cls, equation: Any) -> 'Scan':
        """Reads the equation."""
        params = equation.params
        return cls(
            _program(params['jaxpr']), params['length'], params['num_consts'], params['num_carry']
        )

    def split(self, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carried and sliced operands."""
        first = self.constants + self.carried
        return operands[: self.constants], operands[self.constants : first], operands[first:]


class While(NamedTuple):
    """A while loop: its operands are constants of the condition, those of the body, then what is carried.

    >>> equation = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 1, x))(1).eqns[0]
    >>> While.of(equation).split([1])
    ([], [], [1])
    """

    condition: Program
    body: Program
    condition_constants: int
    body_constants: int

    @classmethod
    def of(cls, equation: Any) -> 'While':
        """Reads the equation."""
        params = equation.params
        programs = _program(params['cond_jaxpr']), _program(params['body_jaxpr'])
        return cls(*programs, params['cond_nconsts'], params['body_nconsts'])

    def split(self, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants of the condition, constants of the body, carried operands."""
        first = self.condition_constants + self.body_constants
        return (
            operands[: self.condition_constants],
            operands[self.condition_constants : first],
            operands[first:],
        )


def first_carried(equation: Any) -> int:
    """The number of the first operand of a loop that it carries: constants stand before it.

    >>> equation = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 1, x))(1).eqns[0]
    >>> first_carried(equation)
    0
    """
    if equation.primitive.name == 'scan':
        return Scan.of(equation).constants
    loop = While.of(equation)
    return loop.condition_constants + loop.body_constants


def branches(equation: Any) -> list[Program]:
    """The programs of which `cond` or `switch` runs one; the first operand says which.

    >>> equation = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, abs, abs, x))(1.0).eqns[-1]
    >>> len(branches(equation))
    2
    """
    return [_program(branch) for branch in equation.params['branches']]
