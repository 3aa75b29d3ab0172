"""How a model uses its parameters: the uses of each leaf by its path, and what a contraction does with its axes."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxpruner import tree as tree_lib
from jaxpruner.trace.program import CONTRACTIONS, AxisNumbers, ProgramPath, dot_axes
from jaxpruner.trace.views import NoRuleError, View


class UnsupportedPrimitive(NotImplementedError):
    """A parameter goes through an operation that is not understood, so its uses are unknown.

    >>> raise UnsupportedPrimitive('kernel: no rule for svd')
    Traceback (most recent call last):
        ...
    jaxpruner.trace.graph.UnsupportedPrimitive: kernel: no rule for svd
    """


# The last number in the path of a `Site` at which a parameter leaves a program as a result.
LEAVES = -1


@dataclasses.dataclass(frozen=True)
class Site:
    """Where in the program a parameter meets data.

    Attributes:
      path: numbers of the equation, of a program inside it, of an equation in that program, and so on: `(2, 0, 5)` is
        equation 5 of program 0 in equation 2. A parameter may also leave that program as a result: `(2, 0, LEAVES)`, or
        a while loop: `(2, LEAVES)`.
      equation: the equation itself, `None` for a result of the program.
      operand: the number of the operand, or of the result, that is read from the parameter.
      view: how it is read.
      callers: the equations around it, the innermost last.
    """

    path: ProgramPath
    equation: Any
    operand: int
    view: Any
    callers: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a parameter: an operation in which it, or a value computed from it alone, meets data.

    Axes are those of the parameter, in ascending order. Axes that were indexed or summed away before are left out.

    Attributes:
      op: `'dot'` (also of groups of rows with a matrix each), `'conv'`, `'gather'` (rows looked up by data),
        `'elementwise'` (added, multiplied, concatenated, …), or `'output'` (returned without meeting data).
      contract: axes that are summed over, the inputs.
      free: axes that the result has, the outputs.
      batch: axes that the result and the other operand have, or axes with an element for each group of rows.
      stack: axes that each trip of a loop takes one element of.
      flops: floating point operations of all trips: two for each product of a contraction that is summed, one for each
        element of an elementwise result. Uses in the same operation each count all of it; parts of a concatenation
        count their shares.
      trips: how often it runs; `None` if data decide. Then `flops` counts a loop's body or a branch once.
      exact: whether the operand has the parameter's own elements, at most moved, cast, copied or masked by constants.
      where: source line.
      site: the operation in the program.

    >>> Use('dot', (0,), (1,), (), (), 48, 1, True, 'model.py:3').contract
    (0,)
    """

    op: str
    contract: tuple[int, ...]
    free: tuple[int, ...]
    batch: tuple[int, ...]
    stack: tuple[int, ...]
    flops: int
    trips: int | None
    exact: bool
    where: str
    site: Site = dataclasses.field(default=Site((), None, 0, None), repr=False, compare=False)

    def read(self, leaf: Any) -> Any:
        """Makes the operand of the operation from the parameter.

        This is a linear function, which `jax.linear_transpose` transposes. Axes that loops take apart come first.

        Args:
          leaf: the parameter.

        Raises:
          ValueError: the use is not exact.
        """
        view: View = self.site.view
        return view.read(leaf)

    @property
    def input_axis(self) -> int | None:
        """The innermost contracted axis in the order of a matrix product's rows.

        For a convolution it is the axis of the input channels. It is `None` if nothing is contracted, or if several
        axes are mixed. Groups of N:M along the inputs may extend beyond this axis: they run over all contracted axes as
        one, in the order of a matrix product's rows.
        """
        if not self.contract:
            return None
        *_, innermost = input_axes_of(self.site.equation, self.site.operand)
        factors = [factor for factor in self.site.view.axes[innermost].factors if factor.axes]
        factors = [factor for factor in factors if factor.axes[0] in self.contract]
        longer = [factor for factor in factors if factor.size > 1] or factors
        axes = longer[-1].axes if longer else ()
        return axes[0] if len(axes) == 1 else None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class UseGraph(Mapping[tree_lib.Path, tuple[Use, ...]]):
    """The uses of a model's parameters, by path. Each leaf is in the mapping, in `opaque`, or in `unused`.

    Attributes:
      opaque: path -> reason, for leaves that go through an operation that is not understood.
      unused: paths of leaves that have no part in the results: zeroing them changes nothing.
      flops: floating point operations of the model: those of all contractions, also between activations, and of
        elementwise operations with parameters, and no others, such as Fourier transforms and custom kernels. Loops and
        branches that data decide count once. Operations in a `shard_map` count for each device.
      program: the traced program, a `jax.extend.core.ClosedJaxpr` of parameters and inputs.

    >>> from jaxpruner.uses import param_uses
    >>> import jax.numpy as jnp
    >>> graph = param_uses(lambda p, x: x @ p['w'], {'w': jnp.ones((3, 4)), 'old': jnp.ones(2)}, jnp.ones((2, 3)))
    >>> list(graph), graph.unused, graph.flops
    ([('w',)], (('old',),), 48)
    >>> graph['w'][0].contract  # as in settings, the path may be a string
    (0,)
    """

    uses: Mapping[tree_lib.Path, tuple[Use, ...]]
    opaque: Mapping[tree_lib.Path, str]
    unused: tuple[tree_lib.Path, ...]
    flops: int
    program: Any = None

    @functools.cached_property
    def _paths(self) -> dict[str, tree_lib.Path]:
        paths = (*self.unused, *self.opaque, *self.uses)
        return {tree_lib.path_string(path): path for path in paths}

    def __getitem__(self, path: tree_lib.Path | str) -> tuple[Use, ...]:
        name = path if isinstance(path, str) else tree_lib.path_string(path)
        # The names of two paths may be the same.
        own: Any = path if path in self.uses else self._paths.get(name)
        if own in self.uses:
            return self.uses[own]
        if own in self.opaque:
            raise UnsupportedPrimitive(
                f'{name}: {self.opaque[own]}; leave this leaf out, or write the model without it'
            )
        if own is not None:
            raise KeyError(
                f'{name!r} has no part in the results of the model: zeroing it changes nothing'
            )
        raise KeyError(f'no parameter {name!r}; {tree_lib.nearest(name, self._paths)}')

    def __contains__(self, path: Any) -> bool:
        return path in self.uses or self._paths.get(path) in self.uses

    def __iter__(self) -> Iterator[tree_lib.Path]:
        return iter(self.uses)

    def __len__(self) -> int:
        return len(self.uses)

    @property
    def leaf_flops(self) -> dict[tree_lib.Path, int]:
        """The floating point operations of each contracted leaf's contractions, for `erk`."""
        by_leaf = {}
        for path, uses in self.items():
            by_leaf[path] = sum(use.flops for use in uses if use.op in ('dot', 'conv'))
        return {path: flops for path, flops in by_leaf.items() if flops}

    def __repr__(self) -> str:
        text = f'{len(self)} used, {len(self.opaque)} opaque, {len(self.unused)} unused'
        return f'UseGraph({text}, {self.flops:,} FLOPs)'

    def __str__(self) -> str:
        rows: list[Any] = ['leaf operation contract free batch stack exact FLOPs trips'.split()]
        for path, uses in self.items():
            for use in uses:
                axes = (use.contract, use.free, use.batch, use.stack)
                texts = [','.join(map(str, numbers)) or '-' for numbers in axes]
                exact, trips = 'yes' if use.exact else 'no', use.trips
                texts += [exact, f'{use.flops:,}', '?' if trips is None else str(trips)]
                rows.append([tree_lib.path_string(path), use.op, *texts])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for path, reason in self.opaque.items():
            lines.append(f'{tree_lib.path_string(path)}  opaque: {reason}')
        for path in self.unused:
            lines.append(f'{tree_lib.path_string(path)}  unused')
        lines.append(f'{self.flops:,} FLOPs in all')
        return '\n'.join(lines)


class Roles(NamedTuple):
    """The axes of one operand, by what an operation does with them."""

    contract: AxisNumbers
    free: AxisNumbers
    batch: AxisNumbers


def roles_of(equation: Any, operand: int) -> Roles:
    """The roles of an operand's axes in a contraction. An axis of groups counts as a batch.

    Raises:
      NoRuleError: the operand is the image of a convolution, or the sizes of groups.
    """
    if operand > 1:
        raise NoRuleError('no rule for groups whose sizes are made of a parameter')
    if CONTRACTIONS[equation.primitive.name] == 'dot':
        axes = dot_axes(equation)
        batch = axes.batch[operand] + (axes.groups if operand else ())
        return Roles(axes.contract[operand], axes.free[operand], batch)
    if operand == 0:
        raise NoRuleError('no rule for a convolution with a parameter as its image')
    output, *inputs = equation.params['dimension_numbers'].rhs_spec
    return Roles(tuple(inputs), (output,), ())


def flops_of(equation: Any) -> int:
    """Floating point operations of a contraction: two for each product that is summed.

    A convolution multiplies each output position by each element of the window, padding included. If the image is
    dilated, as in a transposed convolution, it multiplies each input position. In groups of rows each row counts once.
    """
    variables = (*equation.invars[:2], equation.outvars[0])
    products = 1
    for number, axis in factors_of(equation):
        products *= variables[number].aval.shape[axis]
    return 2 * products


def factors_of(equation: Any) -> list[tuple[int, int]]:
    """The axes whose sizes are multiplied to count the products that a contraction sums; see `flops_of`.

    Each is a pair: the number of a value, 0 and 1 for the operands and 2 for the result, and the number of its axis.
    """
    params, numbers = equation.params, equation.params.get('dimension_numbers')
    of_result = [(2, axis) for axis in range(len(equation.outvars[0].aval.shape))]
    for k, dilation in enumerate(params.get('lhs_dilation', ())):
        if dilation > 1 and params['window_strides'][k] == 1:
            of_result[numbers.out_spec[2 + k]] = 0, numbers.lhs_spec[2 + k]
    return of_result + [(1, axis) for axis in roles_of(equation, 1).contract]


def input_axes_of(equation: Any, operand: int) -> AxisNumbers:
    """An operand's contracted axes in the order in which they form the rows of a matrix, innermost last.

    For a convolution these are the axes of the window, then that of the channels.
    """
    if CONTRACTIONS[equation.primitive.name] == 'dot':
        return tuple(sorted(dot_axes(equation).contract[operand]))
    _, channels, *window = equation.params['dimension_numbers'].rhs_spec
    return (*window, channels)
