"""What the walk through a program knows of a value, where it is, and what it has found."""

from typing import Any, NamedTuple

from jax.extend import source_info_util

from jaxpruner.uses.constants import Constant
from jaxpruner.uses.graph import Use
from jaxpruner.uses.numbers import Number
from jaxpruner.uses.views import View


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
      data: it depends on an input of the model.
      views: how it is read or computed from parameters; only where it is not data.
      number: a whole number that is known, maybe another one in each trip of a loop.
      constant: what it is, where it is made of constants alone and no loop goes through them.

    >>> Value()  # a constant of which nothing is known
    Value(data=False, views=(), number=None, constant=None)
    """

    data: bool = False
    views: tuple[View, ...] = ()
    number: Number | None = None
    constant: Constant | None = None


DATA = Value(True)


class Scope(NamedTuple):
    """Where the walk is.

    Attributes:
      path: the equation's, see `Site`.
      trips: how often it runs; a while loop's body and a branch count once.
      certain: that this is known.
      devices: how many devices run it.
      line: of the source, the nearest that is known.

    >>> Scope().at(2).at(0).path
    (2, 0)
    """

    path: tuple[int, ...] = ()
    trips: int = 1
    certain: bool = True
    devices: int = 1
    line: str = 'an unknown line'

    def at(self, number: int) -> 'Scope':
        """An equation in this program, or a program in this equation."""
        return self._replace(path=(*self.path, number))

    def where(self, equation: Any) -> str:
        """The line of the source that an equation comes from; within JAX, that of the call which led there."""
        return source_info_util.summarize(equation.source_info) or self.line


class Records:
    """What the walk has found.

    Attributes:
      uses: by path of the equation, operand, leaf and region.
      opaque: leaf -> reason.
      flops: by path of the equation.
      uncounted: primitive -> source line.

    >>> Records().copy().opaque
    {}
    """

    def __init__(self):
        self.uses: dict[Any, tuple[int, Use]] = {}
        self.opaque: dict[int, str] = {}
        self.flops: dict[tuple[int, ...], int] = {}
        self.uncounted: dict[str, str] = {}

    def copy(self) -> 'Records':
        """The same, to be changed apart."""
        other = Records()
        other.uses, other.opaque = dict(self.uses), dict(self.opaque)
        other.flops, other.uncounted = dict(self.flops), dict(self.uncounted)
        return other
