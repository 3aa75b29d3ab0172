"""The programs inside an equation, as each version of JAX writes them down, and what of a program is live.

`jit`, `scan`, `while`, `cond` and `shard_map` run programs on their operands. `inside(equation)` reads such an
equation into a record of its programs and of the operands that go into each. JAX renames these primitives and their
parameters between versions: this is the only file that reads them.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

# The versions of JAX that this file was checked on.
_CHECKED = ('0.5.0', '0.5.3', '0.6.2', '0.7.2', '0.8.3', '0.9.2', '0.10.2', '0.11.2', '0.12.0.1')

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
    """An equation that runs one program on its operands; `settings` are those of `jit` and `checkpoint`."""

    equation: Any
    program: Program
    settings: Mapping[str, Any]

    def run(self, function: Callable[..., Any], state: Any, operands: Sequence[Any]) -> Any:
        """`function(state, *operands) -> results, state` in the program's place, jitted or checkpointed like it."""
        name = self.equation.primitive.name
        if name == 'remat2':
            return jax.checkpoint(function, **self.settings)(state, *operands)
        if name not in _JITS:
            return function(state, *operands)
        function.__name__ = self.settings['name']
        operands = _with_shardings(operands, self.settings['in_shardings'])
        jitted = jax.jit(function, inline=self.settings['inline'])
        results, state = jitted(state, *operands)
        return _with_shardings(results, self.settings['out_shardings']), state


class ShardMap(Call):
    """A call whose program each device runs on its part of each axis."""

    @property
    def devices(self) -> int:
        """How many parts it has. Axes of the mesh that are left to the compiler do not count."""
        return self.settings['devices']


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan. Its operands are constants, then carried values, then values that are sliced."""

    equation: Any
    body: Program
    length: int
    reverse: bool
    constants: int
    carried: int
    unroll: int

    @property
    def first_carried(self) -> int:
        """The number of the first operand that is carried."""
        return self.constants

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits operands into constants, carried and sliced ones."""
        end = self.constants + self.carried
        return (
            list(operands[: self.constants]),
            list(operands[self.constants : end]),
            list(operands[end:]),
        )

    def split_results(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits results into carried and stacked ones."""
        return list(results[: self.carried]), list(results[self.carried :])

    def run(
        self, body: Callable[..., Any], carried: Any, sliced: Any, length: int | None = None
    ) -> Any:
        """Scans with another body in the same direction, unrolled alike; `length` if it has other trips."""
        # JAX 0.12 does not split transposes any more.
        split_transpose = self.equation.params.get('_split_transpose', False)
        length = self.length if length is None else length
        return lax.scan(body, carried, sliced, length, self.reverse, self.unroll, split_transpose)


@dataclasses.dataclass(frozen=True)
class While:
    """A while loop. Its operands are constants of the condition, constants of the body, then carried values."""

    equation: Any
    condition: Program
    body: Program
    condition_constants: int
    body_constants: int

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


@dataclasses.dataclass(frozen=True)
class Cond:
    """An equation that runs one of its branches. The first operand says which, the others go into the branch."""

    equation: Any
    branches: tuple[Program, ...]


Inside = Call | Cond | Scan | While

_JITS = ('jit', 'pjit')
# Calls with a derivative rule of their own.
RULED_BACKWARDS = frozenset(('custom_vjp_call', 'custom_vjp_call_jaxpr'))
RULED = RULED_BACKWARDS | {'custom_jvp_call'}
_CALLS = frozenset((*_JITS, *RULED, 'call', 'closed_call', 'composite', 'remat2', 'shard_map'))
_SETTINGS = {
    'remat2': ('prevent_cse', 'policy'),
    **dict.fromkeys(_JITS, ('name', 'inline', 'in_shardings', 'out_shardings')),
}


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
            return Scan(equation, body, length, reverse, constants, carried, unroll)
        if name == 'while':
            condition, body = Program.of(params['cond_jaxpr']), Program.of(params['body_jaxpr'])
            return While(equation, condition, body, params['cond_nconsts'], params['body_nconsts'])
        if name == 'cond':
            return Cond(equation, tuple(map(Program.of, params['branches'])))
        if name not in _CALLS:
            return None
        (key,) = params.keys() & {'jaxpr', 'call_jaxpr', 'fun_jaxpr'}
        program = Program.of(params[key])
        if name == 'shard_map':
            sizes = dict(params['mesh'].shape)
            if 'auto' in params:
                manual = sizes.keys() - params['auto']
            else:
                (key,) = params.keys() & {'manual_axes', 'newly_manual_axes'}
                manual = params[key]
            devices = math.prod(sizes[axis] for axis in manual)
            return ShardMap(equation, program, {'devices': devices})
        return Call(equation, program, {key: params[key] for key in _SETTINGS.get(name, ())})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        line = source_info_util.summarize(equation.source_info) or 'an unknown line'
        raise NotImplementedError(
            f'JAX {jax.__version__} writes {name} ({line}) in a way that jaxpruner does not know, with the parameters '
            f'{", ".join(params)}; upgrade jaxpruner, or install JAX {_CHECKED[-1]}'
        ) from error


def bind(
    equation: Any, operands: Sequence[Any], changed: Mapping[str, Any] = types.MappingProxyType({})
) -> list[Any]:
    """Runs an equation on values, with some of its parameters changed. `None` is a value that is not needed."""
    values = []
    for variable, operand in zip(equation.invars, operands, strict=True):
        values.append(jnp.zeros_like(variable.aval) if operand is None else operand)
    # Older JAX keeps the functions of a call apart from its other parameters.
    bound = equation.primitive.get_bind_params({**equation.params, **changed})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable."""
    return tuple(variable.aval.shape)


def _with_shardings(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Constrains values to the shardings that a call asks for. Empty trees stay."""
    placed = []
    for value, sharding in zip(values, shardings, strict=True):
        if jax.tree.leaves(value) and isinstance(sharding, jax.sharding.Sharding):
            value = lax.with_sharding_constraint(value, sharding)
        placed.append(value)
    return placed


# Callbacks that only show something change no result.
_SHOWS = frozenset({'debug_callback', 'debug_print'})


class Live(NamedTuple):
    """What a program needs for some of its results.

    Attributes:
      inputs: for each input, whether it is needed.
      results: for each equation, which of its results are needed; all False if it can be left out.
    """

    inputs: Needed
    results: tuple[Needed, ...]


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
        results.append(flags)
        if has_effect or any(flags):
            add(equation.invars, _needed_operands(equation, flags))
    inputs = tuple(id(variable) in live_ids for variable in jaxpr.invars)
    return Live(inputs, tuple(reversed(results)))


def _needed_operands(equation: Any, needed: Needed) -> Sequence[bool]:
    """Which operands of an equation its needed results depend on."""
    match inside(equation):
        case Call() as call:
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
        case While() as loop:
            carried = needed_in_body(loop, needed)
            condition = live(loop.condition.jaxpr, (True,)).inputs
            body = live(loop.body.jaxpr, carried).inputs
            return [
                *condition[: loop.condition_constants],
                *body[: loop.body_constants],
                *carried,
            ]
    return [True] * len(equation.invars)


def needed_in_body(loop: Scan | While, needed: Needed) -> Needed:
    """Finds the results of a loop's body that some results of the loop need."""
    if isinstance(loop, While):
        first, carried = loop.body_constants, len(needed)
        decide = live(loop.condition.jaxpr, (True,)).inputs[loop.condition_constants :]
        needed = tuple(map(max, needed, decide))
    else:
        first, carried = loop.constants, loop.carried
    while True:
        inputs = live(loop.body.jaxpr, needed).inputs[first : first + carried]
        after = (*map(max, needed, inputs), *needed[carried:])
        if after == needed:
            return needed
        needed = after
