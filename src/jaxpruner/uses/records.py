"""Records of the walk through a program: a value, a position, and the findings."""

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
    """What is known of a value. The default is an unknown constant.

    Attributes:
      data: whether it depends on an input of the model.
      views: how it is read or computed from parameters; empty for data.
      known_integer: its value if it is a known integer, which may differ between the trips of a loop.
      constant: the constant, if it is made only of constants and does not differ between trips.
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
    """Whether one of these values is made of a parameter."""
    return any(views_of(values))


class WalkPosition(NamedTuple):
    """Where the walk is.

    Attributes:
      needed: which results of the program or equation the results of the model depend on.
      path: of the equation, see `Site`.
      trips: how often it runs. The body of a while loop and a branch count once.
      trips_are_known: whether it runs exactly so often. In a while loop or a branch data may decide.
      devices: how many devices run it.
      line: of the source, the nearest known one.
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
        """A program in this equation, with these of its results needed; by default as for the equation."""
        needed = self.needed if needed is None else tuple(needed)
        return self.at(number)._replace(needed=needed, line=self.where(equation))

    def where(self, equation: Any) -> str:
        """The line of the source that an equation comes from. For an equation made by JAX, the line of the call."""
        if equation is None:
            return 'the result'
        return source_info_util.summarize(equation.source_info) or self.line


class Findings:
    """The findings of the walk.

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
        """Copies the findings."""
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
          site: of the operand.
          position: of the equation.
          flops: of one run of the equation.
          roles: of the operand's axes; `None` if all are free.
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
                # An axis that was indexed does not lie there any more.
                lengths = [shape[axis] for axis in factor.axes]
                if factor.size > 1 or math.prod(lengths) == 1:
                    factors.append(factor)
        return views.axes_of(factors)


def _share_of(site: Site) -> float:
    """The share of an operand's elements that are the parameter's."""
    sizes = [axis.size for axis in site.view.axes]
    elements = math.prod(site.view.shape)
    return math.prod(sizes) / max(elements, 1)


class Walker(Protocol):
    """The part of the walk that rules for equations with programs inside use."""

    findings: Findings

    def visit_program(self, program: Program, inputs: Values, position: WalkPosition) -> Values:
        """Walks through a program."""
        ...
