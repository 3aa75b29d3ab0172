"""The programs inside an equation, as each version of JAX writes them down.

`jit`, `scan`, `while`, `cond` and `shard_map` run programs on their operands. `inside(equation)` reads such an
equation into a record of its programs and of the operands that go into each. `bind`, `run_call` and `Scan.run` run it
again, with other operands or another program inside.

JAX renames these primitives and their parameters between versions, so this is the only file that reads them.

A primitive with a program inside has a row of `_READERS`. If no record fits, add a record and a method of
`visitors.Visitor`.
"""

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.extend.core
from jax import lax
from jax.extend import source_info_util

# The versions of JAX that this file was checked on.
_CHECKED = ('0.5.0', '0.5.3', '0.6.2', '0.7.2', '0.8.3', '0.9.2', '0.10.2', '0.11.2', '0.12.0.1')

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
        with _params_of(equation) as params:
            (key,) = params.keys() & {'jaxpr', 'call_jaxpr', 'fun_jaxpr'}
            return cls(equation, Program.of(params[key]))


class ShardMap(Call):
    """A call whose program each device runs on its part of each axis."""

    def device_count(self) -> int:
        """How many parts it has. Axes of the mesh that are left to the compiler do not count."""
        with _params_of(self.equation) as params:
            sizes = dict(params['mesh'].shape)
            if 'auto' in params:
                manual = set(sizes).difference(params['auto'])
            else:
                (key,) = params.keys() & {'manual_axes', 'newly_manual_axes'}
                manual = params[key]
        return math.prod(map(sizes.__getitem__, manual))


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
        with _params_of(equation) as params:
            if 'num_consts' in params:
                constants, carried = params['num_consts'], params['num_carry']
            else:  # JAX 0.12 has groups of constants, carried and sliced operands
                constants, carried, _ = map(len, params['ft_in'].unpack())
            return cls(
                equation,
                body=Program.of(params['jaxpr']),
                length=params['length'],
                reverse=params['reverse'],
                constants=constants,
                carried=carried,
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

    def run(
        self, body: Callable[..., Any], carried: Any, sliced: Any, length: int | None = None
    ) -> Any:
        """Scans with another body in the same direction, unrolled alike; `length` if it has other trips."""
        with _params_of(self.equation) as params:
            unroll = params['unroll']
        split_transpose = params.get('_split_transpose', False)  # JAX 0.12 has it no more
        length = self.length if length is None else length
        return lax.scan(body, carried, sliced, length, self.reverse, unroll, split_transpose)


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
        with _params_of(equation) as params:
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
        with _params_of(equation) as params:
            return cls(equation, tuple(map(Program.of, params['branches'])))


Inside = Call | Cond | Scan | While

_JITS = ('jit', 'pjit')
# Calls with a derivative rule of their own.
RULED_BACKWARDS = frozenset(('custom_vjp_call', 'custom_vjp_call_jaxpr'))
RULED = RULED_BACKWARDS | {'custom_jvp_call'}
_CALLS = (*_JITS, *RULED, 'call', 'closed_call', 'composite', 'remat2')
_READERS: dict[str, Callable[[Any], Inside]] = {
    **dict.fromkeys(_CALLS, Call.of),
    'cond': Cond.of,
    'scan': Scan.of,
    'shard_map': ShardMap.of,
    'while': While.of,
}


def inside(equation: Any) -> Inside | None:
    """The record of the programs inside an equation; `None` if there are none.

    Raises:
      NotImplementedError: this version of JAX writes the primitive in a way that is not known here.
    """
    reader = _READERS.get(equation.primitive.name)
    return None if reader is None else reader(equation)


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


def run_call(equation: Any, run: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """Runs a function in the place of a call's program, jitted or checkpointed as the call was.

    Args:
      equation: the call.
      run: computes what the program does. Operands and results may be empty trees.
      operands: of the call.
    """
    name = equation.primitive.name
    if name == 'remat2':
        with _params_of(equation) as params:
            settings = {key: params[key] for key in ('prevent_cse', 'policy')}
        run = jax.checkpoint(run, **settings)
    if name not in _JITS:
        return run(*operands)
    with _params_of(equation) as params:
        run.__name__, inline = params['name'], params['inline']
        shardings_in, shardings_out = params['in_shardings'], params['out_shardings']
    operands = _with_shardings(operands, shardings_in)
    results = jax.jit(run, inline=inline)(*operands)
    return _with_shardings(results, shardings_out)


def _with_shardings(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Constrains values to the shardings that a call asks for. Empty trees stay."""
    placed = []
    for value, sharding in zip(values, shardings, strict=True):
        is_array = bool(jax.tree.leaves(value))
        if is_array and isinstance(sharding, jax.sharding.Sharding):
            value = lax.with_sharding_constraint(value, sharding)
        placed.append(value)
    return placed


@contextlib.contextmanager
def _params_of(equation: Any) -> Iterator[Mapping[str, Any]]:
    """Gives the parameters of an equation to be read.

    Raises:
      NotImplementedError: they are not what they were in the versions of JAX that this file was checked on.
    """
    try:
        yield equation.params
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        line = source_info_util.summarize(equation.source_info) or 'an unknown line'
        raise NotImplementedError(
            f'JAX {jax.__version__} writes {equation.primitive.name} ({line}) in a way that jaxpruner does not know, '
            f'with the parameters {", ".join(equation.params)}; upgrade jaxpruner, or install JAX {_CHECKED[-1]}'
        ) from error
