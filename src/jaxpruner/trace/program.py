"""The programs inside an equation, as each version of JAX writes them down, and what of a program is live.

`jit`, `scan`, `while`, `cond` and `shard_map` run programs on their operands. `inside(equation)` reads such an
equation into a record of its programs and of the operands that go into each. JAX renames these primitives and their
parameters between versions: this is the only file that reads them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend import source_info_util

# The numbers of an equation, of a program inside it, of an equation in that program, …; see `graph.Site`. In a while
# loop, program 0 is the condition and program 1 is the body.
ProgramPath = tuple[int, ...]
# For each of some values, whether it is needed.
Needed = tuple[bool, ...]


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


@dataclasses.dataclass(frozen=True)
class Call:
    """An equation that runs one program on its operands."""

    equation: Any
    program: Program

    def run(self, function: Callable[..., Any], state: Any, operands: Sequence[Any]) -> Any:
        """`function(state, *operands) -> results, state` in the program's place, checkpointed like it."""
        if self.equation.primitive.name == 'remat2':
            settings = {key: self.equation.params[key] for key in ('prevent_cse', 'policy')}
            function = jax.checkpoint(function, **settings)
        return function(state, *operands)


@dataclasses.dataclass(frozen=True)
class ShardMap(Call):
    """A call whose program each device runs on its part of each axis.

    Attributes:
      devices: how many parts there are. Axes of the mesh that are left to the compiler do not count.
    """

    devices: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop. Its operands are constants of its condition, constants of its body, carried values, and sliced ones.

    Attributes:
      first_constant: the number of the first constant of the body.
      first_carried: the number of the first operand that is carried.
      carried: how many are.
    """

    equation: Any
    body: Program
    first_constant: int
    first_carried: int
    carried: int

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits operands into constants of the body, carried and sliced ones."""
        operands, end = list(operands), self.first_carried + self.carried
        constants = operands[self.first_constant : self.first_carried]
        return constants, operands[self.first_carried : end], operands[end:]

    def split_results(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits results into carried and stacked ones."""
        return list(results[: self.carried]), list(results[self.carried :])


@dataclasses.dataclass(frozen=True)
class Scan(Loop):
    """A scan."""

    length: int
    reverse: bool
    unroll: int


@dataclasses.dataclass(frozen=True)
class While(Loop):
    """A while loop, in which nothing is sliced."""

    condition: Program


@dataclasses.dataclass(frozen=True)
class Cond:
    """An equation that runs one of its branches. The first operand says which, the others go into the branch."""

    equation: Any
    branches: tuple[Program, ...]


Inside = Call | Cond | Scan | While

# Calls with a derivative rule of their own.
RULED_BACKWARDS = frozenset(('custom_vjp_call', 'custom_vjp_call_jaxpr'))
RULED = RULED_BACKWARDS | {'custom_jvp_call'}
_CALLS = RULED | frozenset('call closed_call composite jit pjit remat2 shard_map'.split())


def inside(equation: Any) -> Inside | None:
    """The record of the programs inside an equation; `None` if there are none.

    Raises:
      NotImplementedError: this version of JAX writes the primitive in a way that is not known here.
    """
    name, params = equation.primitive.name, equation.params
    try:
        if name == 'scan':
            if 'num_consts' in params:
                constants, carried = params['num_consts'], params['num_carry']
            else:  # JAX 0.12 has groups of constants, carried and sliced operands
                constants, carried, _ = map(len, params['ft_in'].unpack())
            body, length = Program.of(params['jaxpr']), params['length']
            reverse, unroll = params['reverse'], params['unroll']
            return Scan(equation, body, 0, constants, carried, length, reverse, unroll)
        if name == 'while':
            first = params['cond_nconsts']
            first_carried, carried = first + params['body_nconsts'], len(equation.outvars)
            body, condition = Program.of(params['body_jaxpr']), Program.of(params['cond_jaxpr'])
            return While(equation, body, first, first_carried, carried, condition)
        if name == 'cond':
            return Cond(equation, tuple(map(Program.of, params['branches'])))
        if name not in _CALLS:
            return None
        (key,) = params.keys() & {'jaxpr', 'call_jaxpr', 'fun_jaxpr'}
        program = Program.of(params[key])
        if name != 'shard_map':
            return Call(equation, program)
        sizes = dict(params['mesh'].shape)
        if 'auto' in params:
            manual = sizes.keys() - params['auto']
        else:
            (key,) = params.keys() & {'manual_axes', 'newly_manual_axes'}
            manual = params[key]
        return ShardMap(equation, program, math.prod(sizes[axis] for axis in manual))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        line = source_info_util.summarize(equation.source_info)
        raise NotImplementedError(
            f'JAX {jax.__version__} writes {name} ({line}) in a way that jaxpruner does not know; upgrade jaxpruner'
        ) from error


def bind(
    equation: Any, operands: Sequence[Any], changed: Mapping[str, Any] | None = None
) -> list[Any]:
    """Runs an equation on values, with some of its parameters changed. `None` is a value that is not needed."""
    values = []
    for variable, operand in zip(equation.invars, operands, strict=True):
        values.append(jnp.zeros_like(variable.aval) if operand is None else operand)
    # Older JAX keeps the functions of a call apart from its other parameters.
    bound = equation.primitive.get_bind_params({**equation.params, **(changed or {})})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable."""
    return tuple(variable.aval.shape)


class Live(NamedTuple):
    """What a program needs for some of its results.

    Attributes:
      inputs: for each input, whether it is needed.
      results: for each equation, which of its results are needed; all False if it can be left out.
    """

    inputs: Needed
    results: tuple[Needed, ...]


# Callbacks that only show something change no result.
_SHOWS = frozenset({'debug_callback', 'debug_print'})


@functools.lru_cache(4096)
def live(jaxpr: Any, needed: Needed, shown: bool = False) -> Live:
    """Finds what a program needs for the needed ones of its results. Other equations are no uses of a parameter.

    `shown`: what callbacks show is needed, too.
    """
    live_ids: set[int] = set()  # literals are not hashable in some versions of JAX

    def add(variables: Sequence[Any], flags: Sequence[bool]) -> None:
        pairs = zip(variables, flags, strict=True)
        live_ids.update(id(variable) for variable, is_needed in pairs if is_needed)

    add(jaxpr.outvars, needed)
    results = []
    for equation in reversed(jaxpr.eqns):
        has_effect = bool(equation.effects) and (shown or equation.primitive.name not in _SHOWS)
        flags = tuple(has_effect or id(result) in live_ids for result in equation.outvars)
        if equation.primitive.name in RULED:  # the rule may read what the program does not
            flags = (any(flags),) * len(flags)
        results.append(flags)
        if has_effect or any(flags):
            add(equation.invars, _needed_operands(equation, flags))
    inputs = tuple(id(variable) in live_ids for variable in jaxpr.invars)
    return Live(inputs, tuple(reversed(results)))


def _needed_operands(equation: Any, needed: Needed) -> Sequence[bool]:
    """Which operands of an equation its needed results depend on."""
    match inside(equation):
        case Call() as call if equation.primitive.name not in RULED:
            return live(call.program.jaxpr, needed).inputs
        case Cond() as cond:
            of_branches = [live(branch.jaxpr, needed).inputs for branch in cond.branches]
            return [True, *map(any, zip(*of_branches, strict=True))]
        case Scan(length=0) as scan:  # only carried values are passed through
            constants, _, sliced = scan.split([False] * len(equation.invars))
            return [*constants, *needed[: scan.carried], *sliced]
        case Scan() as scan:
            inputs = live(scan.body.jaxpr, needed_in_body(scan, needed)).inputs
            constants, carried, sliced = scan.split(inputs)
            # A carried value may be returned without having gone through the body.
            return [*constants, *map(max, carried, needed), *sliced]
    return [True] * len(equation.invars)


def needed_in_body(loop: Loop, needed: Needed) -> Needed:
    """Finds the results of a loop's body that some results of the loop need. A while loop needs all of them."""
    if isinstance(loop, While):
        return (True,) * len(needed)
    first, carried = loop.first_carried, loop.carried
    while True:
        inputs = live(loop.body.jaxpr, needed).inputs[first : first + carried]
        after = (*map(max, needed, inputs), *needed[carried:])
        if after == needed:
            return needed
        needed = after
