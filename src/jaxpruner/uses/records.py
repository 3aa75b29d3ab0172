"""What the walk through a program knows of a value, where it is, what it has found, and what its rules need of it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jax.extend import source_info_util

from jaxpruner.uses import contractions, views
from jaxpruner.uses.bodies import Program, ProgramPath
from jaxpruner.uses.constants import Constant
from jaxpruner.uses.graph import Site, Use
from jaxpruner.uses.known_integers import KnownInteger
from jaxpruner.uses.views import Factor, Views


class Value(NamedTuple):
    """What is known of a value; as a default, of a constant of which nothing is known.

    Attributes:
      data: it depends on an input of the model.
      views: how it is read or computed from parameters; only where it is not data.
      known_integer: a whole number that is known, maybe another one in each trip of a loop.
      constant: what it is, where it is made of constants alone and no loop goes through them.
    """

    data: bool = False
    views: Views = ()
    known_integer: KnownInteger | None = None
    constant: Constant | None = None


Values = list[Value]
DATA = Value(True)


def views_of(values: Sequence[Value]) -> list[Views]:
    """The views of each value."""
    return [value.views for value in values]


def has_views(values: Sequence[Value]) -> bool:
    """Whether a parameter has a part in some of these values."""
    return any(views_of(values))


class WalkPosition(NamedTuple):
    """Where the walk is.

    Attributes:
      needed: which results of the program, or of the equation, have a part in the results of the model.
      path: the equation's, see `Site`.
      trips: how often it runs; a while loop's body and a branch count once.
      trips_are_known: whether `trips` is how often it runs; not in a while loop or a branch, where data may decide.
      devices: how many devices run it.
      line: of the source, the nearest that is known.
    """

    needed: tuple[bool, ...] = ()
    path: ProgramPath = ()
    trips: int = 1
    trips_are_known: bool = True
    devices: int = 1
    line: str = 'an unknown line'

    def at(self, number: int) -> 'WalkPosition':
        """An equation in this program, or a program in this equation."""
        return self._replace(path=(*self.path, number))

    def inside(
        self, equation: Any, number: int, needed: Sequence[bool] | None = None
    ) -> 'WalkPosition':
        """A program in this equation, of which these results are needed; by default the equation's."""
        needed = self.needed if needed is None else tuple(needed)
        return self.at(number)._replace(needed=needed, line=self.where(equation))

    def where(self, equation: Any) -> str:
        """The line of the source that an equation comes from; within JAX, that of the call which led there."""
        if equation is None:
            return 'the result'
        return source_info_util.summarize(equation.source_info) or self.line


class Findings:
    """What the walk has found.

    Attributes:
      uses: by path of the equation, operand, leaf and region.
      opaque: leaf -> reason.
      flops: by path of the equation.
      uncounted: primitive -> source line.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.shapes = shapes
        self.uses: dict[Any, Use] = {}
        self.opaque: dict[int, str] = {}
        self.flops: dict[ProgramPath, int] = {}
        self.uncounted: dict[str, str] = {}

    def copy(self) -> 'Findings':
        """The same, to be changed apart."""
        other = Findings(self.shapes)
        other.uses = dict(self.uses)
        other.opaque = dict(self.opaque)
        other.flops = dict(self.flops)
        other.uncounted = dict(self.uncounted)
        return other

    def add_opaque(
        self, values: Sequence[Value], reason: str, equation: Any, position: WalkPosition
    ) -> None:
        """Notes that the parameters in these values cannot be followed further."""
        for value in values:
            for view in value.views:
                self.opaque.setdefault(view.leaf, f'{reason} ({position.where(equation)})')

    def add_flops(self, flops: int, position: WalkPosition) -> None:
        """Notes the floating point operations of one run of an equation."""
        self.flops[position.path] = flops * position.trips * position.devices

    def add_use(
        self,
        op: str,
        site: Site,
        position: WalkPosition,
        flops: int = 0,
        roles: contractions.Roles | None = None,
    ) -> None:
        """Notes a use.

        Args:
          op: the operation, as in `Use`.
          site: where it happens.
          position: of the equation.
          flops: of one run of the equation.
          roles: what happens to the operand's axes; `None` for all free.
        """
        view = site.view
        if roles is None:
            every = tuple(range(len(view.axes)))
            roles = contractions.Roles(contract=(), free=every, batch=())
        share = 1.0
        stack: list[Factor] = []
        for entry in view.stack:
            share *= entry.share
            stack += entry.axis.factors
        trips = round(position.trips * share)
        if flops:
            share *= _share_of(site)
        use = Use(
            op=op,
            contract=self._leaf_axes(site, roles.contract),
            free=self._leaf_axes(site, roles.free),
            batch=self._leaf_axes(site, roles.batch),
            stack=views.axes_of(stack),
            flops=round(flops * position.trips * position.devices * share),
            trips=trips if position.trips_are_known else None,
            exact=view.exact,
            where=position.where(site.equation),
            site=site,
        )
        key = site.path, site.operand, view.leaf, view.region
        self.uses[key] = use

    def _leaf_axes(self, site: Site, axes: Sequence[int]) -> tuple[int, ...]:
        """The parameter's axes that lie along axes of an operand."""
        shape = self.shapes[site.view.leaf]
        factors = []
        for i in axes:
            for factor in site.view.axes[i].factors:
                # An axis of which one element was taken is not there any more.
                lengths = [shape[axis] for axis in factor.axes]
                if factor.size > 1 or math.prod(lengths) == 1:
                    factors.append(factor)
        return views.axes_of(factors)


def _share_of(site: Site) -> float:
    """The share of an operand that is the parameter's."""
    sizes = [axis.size for axis in site.view.axes]
    elements = math.prod(site.view.shape)
    return math.prod(sizes) / max(elements, 1)


class Walker(Protocol):
    """What the rules of equations with programs inside need of the walk."""

    findings: Findings

    def visit_program(self, program: Program, inputs: Values, position: WalkPosition) -> Values:
        """Walks through a program."""
        ...
