"""The programs inside an equation, and visitors of programs.

`jit`, `scan`, `while`, `cond` and `shard_map` run programs on their operands. `inside(equation)` reads such an
equation into a record of its programs and of the operands that go into each. A `Visitor` has one method for each of
these records, and one for equations with no program inside. An `Evaluator` is a visitor that goes through a program
from its inputs to its results. Its subclass defines what it knows of a value.

A primitive with a program inside has a row of `_READERS`. If no record fits, add a record and a method of `Visitor`.
"""

import abc
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import jax.extend.core
from jax.extend.core import Literal

# The numbers of an equation, of a program inside it, of an equation in that program, …; see `graph.Site`.
ProgramPath = tuple[int, ...]


class Program(NamedTuple):
    """A program and its constants."""

    jaxpr: jax.extend.core.Jaxpr
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, jaxpr: Any) -> 'Program':
        """The program of a jaxpr, closed or not."""
        if hasattr(jaxpr, 'jaxpr'):
            return cls(jaxpr.jaxpr, tuple(jaxpr.consts))
        return cls(jaxpr, ())


class Call(NamedTuple):
    """An equation that runs one program on its operands."""

    equation: Any
    program: Program

    @classmethod
    def of(cls, equation: Any) -> Self:
        """Reads the equation."""
        for key in ('jaxpr', 'call_jaxpr', 'fun_jaxpr'):
            if key in equation.params:
                return cls(equation, Program.of(equation.params[key]))
        raise KeyError(equation.primitive.name)


class ShardMap(Call):
    """A call whose program each device runs on its part of each axis."""


class Scan(NamedTuple):
    """A scan. Its operands are constants, then carried values, then values that are sliced."""

    equation: Any
    body: Program
    length: int
    reverse: bool
    constants: int
    carried: int

    @classmethod
    def of(cls, equation: Any) -> 'Scan':
        """Reads the equation."""
        params = equation.params
        return cls(
            equation,
            body=Program.of(params['jaxpr']),
            length=params['length'],
            reverse=params['reverse'],
            constants=params['num_consts'],
            carried=params['num_carry'],
        )

    @property
    def first_carried(self) -> int:
        """The number of the first operand that is carried."""
        return self.constants

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits operands into constants, carried and sliced ones."""
        first_sliced = self.constants + self.carried
        return (
            list(operands[: self.constants]),
            list(operands[self.constants : first_sliced]),
            list(operands[first_sliced:]),
        )

    def split_results(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits results into carried and stacked ones."""
        return list(results[: self.carried]), list(results[self.carried :])


class While(NamedTuple):
    """A while loop. Its operands are constants of the condition, constants of the body, then carried values."""

    equation: Any
    condition: Program
    body: Program
    condition_constants: int
    body_constants: int

    @classmethod
    def of(cls, equation: Any) -> 'While':
        """Reads the equation."""
        params = equation.params
        return cls(
            equation,
            condition=Program.of(params['cond_jaxpr']),
            body=Program.of(params['body_jaxpr']),
            condition_constants=params['cond_nconsts'],
            body_constants=params['body_nconsts'],
        )

    @property
    def first_carried(self) -> int:
        """The number of the first operand that is carried."""
        return self.condition_constants + self.body_constants

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits operands into constants of the condition, constants of the body, and carried ones."""
        return (
            list(operands[: self.condition_constants]),
            list(operands[self.condition_constants : self.first_carried]),
            list(operands[self.first_carried :]),
        )


class Cond(NamedTuple):
    """An equation that runs one of its branches. The first operand says which, the others go into the branch."""

    equation: Any
    branches: tuple[Program, ...]

    @classmethod
    def of(cls, equation: Any) -> 'Cond':
        """Reads the equation."""
        branches = map(Program.of, equation.params['branches'])
        return cls(equation, tuple(branches))


Inside = Call | Cond | Scan | While

# Names differ between versions of JAX.
_CALLS = """
    jit pjit closed_call core_call call remat remat2 checkpoint composite custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr
""".split()
_READERS: dict[str, Callable[[Any], Inside]] = {
    **dict.fromkeys(_CALLS, Call.of),
    'cond': Cond.of,
    'scan': Scan.of,
    'shard_map': ShardMap.of,
    'while': While.of,
}


def inside(equation: Any) -> Inside | None:
    """The record of the programs inside an equation; `None` if there are none."""
    reader = _READERS.get(equation.primitive.name)
    return None if reader is None else reader(equation)


class PositionLike(Protocol):
    """Where a visitor is."""

    def at(self, number: int) -> Self:
        """An equation in this program, or a program in this equation."""
        ...


class Position(NamedTuple):
    """A position that has only a path.

    In a while loop, program 0 is the condition and program 1 is the body.
    """

    path: ProgramPath = ()

    def at(self, number: int) -> 'Position':
        """An equation in this program, or a program in this equation."""
        return Position((*self.path, number))


T = TypeVar('T')
P = TypeVar('P', bound=PositionLike)


class Visitor(abc.ABC, Generic[T, P]):
    """Visits equations. `T` is what it knows of a value, and `P` is its position.

    Each method gets what is known of the operands, and returns what is known of the results.
    """

    @abc.abstractmethod
    def visit_program(self, program: Program, inputs: Sequence[T], position: P) -> list[T]:
        """Visits a program."""

    @abc.abstractmethod
    def visit_plain(self, equation: Any, operands: list[T], position: P) -> list[T]:
        """Visits an equation with no program inside, or one whose programs the visitor does not visit."""

    def visit_equation(self, equation: Any, operands: list[T], position: P) -> list[T]:
        """Visits an equation, by the method for the programs inside it."""
        match inside(equation):
            case ShardMap() as shard_map:
                return self.visit_shard_map(shard_map, operands, position)
            case Call() as call:
                return self.visit_call(call, operands, position)
            case Scan() as scan:
                return self.visit_scan(scan, operands, position)
            case While() as loop:
                return self.visit_while(loop, operands, position)
            case Cond() as cond:
                return self.visit_cond(cond, operands, position)
        return self.visit_plain(equation, operands, position)

    def visit_call(self, call: Call, operands: list[T], position: P) -> list[T]:
        """Visits a call. Its program has number 0."""
        return self.visit_program(call.program, operands, position.at(0))

    def visit_shard_map(self, shard_map: ShardMap, operands: list[T], position: P) -> list[T]:
        """Visits a program that each device runs."""
        return self.visit_plain(shard_map.equation, operands, position)

    def visit_scan(self, scan: Scan, operands: list[T], position: P) -> list[T]:
        """Visits a scan."""
        return self.visit_plain(scan.equation, operands, position)

    def visit_while(self, loop: While, operands: list[T], position: P) -> list[T]:
        """Visits a while loop."""
        return self.visit_plain(loop.equation, operands, position)

    def visit_cond(self, cond: Cond, operands: list[T], position: P) -> list[T]:
        """Visits an equation with branches."""
        return self.visit_plain(cond.equation, operands, position)


class Evaluator(Visitor[T, P]):
    """Goes through a program from its inputs to its results."""

    @abc.abstractmethod
    def constant(self, value: Any, aval: Any) -> T:
        """What is known of a constant in a program. `aval` has its shape and dtype."""

    def positions_in(self, program: Program, position: P) -> Iterable[P]:
        """The position of each equation of a program."""
        count = len(program.jaxpr.eqns)
        return map(position.at, range(count))

    def visit_program(self, program: Program, inputs: Sequence[T], position: P) -> list[T]:
        """Visits each equation of a program."""
        jaxpr = program.jaxpr
        values: dict[int, T] = {}
        for variable, constant in zip(jaxpr.constvars, program.constants, strict=True):
            values[id(variable)] = self.constant(constant, variable.aval)

        def write(variables: Iterable[Any], new_values: Iterable[T]) -> None:
            values.update(zip(map(id, variables), new_values, strict=True))

        def read(variable: Any) -> T:
            if isinstance(variable, Literal):
                return self.constant(variable.val, variable.aval)
            return values[id(variable)]

        write(jaxpr.invars, inputs)
        positions = self.positions_in(program, position)
        for equation, at_equation in zip(jaxpr.eqns, positions, strict=True):
            operands = list(map(read, equation.invars))
            results = self.visit_equation(equation, operands, at_equation)
            write(equation.outvars, results)
        return list(map(read, jaxpr.outvars))


def bind(
    equation: Any, operands: Sequence[Any], changed: Mapping[str, Any] = types.MappingProxyType({})
) -> list[Any]:
    """Runs an equation on values, with some of its parameters changed."""
    # Older JAX keeps the functions of a call apart from its other parameters.
    bound = equation.primitive.get_bind_params({**equation.params, **changed})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]
