"""Budgets: the share of parameters, FLOPs, bytes or time that may stay, and the search for counts that meet it."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

from jaxpruner import tree as tree_lib
from jaxpruner.structure.choosing import latency
from jaxpruner.structure.choosing.ranking import RemovalOrder

Quantity = Literal['parameters', 'flops', 'bytes', 'latency']
# {group: how many stay} -> the cost of the model
Measure = Callable[[Mapping[str, int]], float]


@dataclasses.dataclass(frozen=True)
class Budget:
    """The share of a quantity that may stay.

    >>> Budget.parse('flops=0.5')
    Budget(quantity='flops', share=0.5)
    """

    quantity: Quantity
    share: float

    @classmethod
    def parse(cls, text: Any) -> 'Budget':
        """Reads `'flops=0.5'`.

        Raises:
          TypeError: it is no string.
          ValueError: the quantity is unknown, or the share is not between 0 and 1.
        """
        if not isinstance(text, str):
            raise TypeError(f"budget is text such as 'flops=0.5', got {text!r}")
        quantity, sign, number = text.partition('=')
        quantities = get_args(Quantity)
        if quantity not in quantities:
            nearest = tree_lib.nearest(quantity, quantities)
            raise ValueError(f'budget={text!r}: {nearest}')
        try:
            share = float(number)
        except ValueError:
            share = 0.0
        if not sign or not 0 < share < 1:
            raise ValueError(
                f'budget={text!r}: give the share that stays, between 0 and 1, such as {quantity}=0.5'
            )
        return cls(cast(Quantity, quantity), share)

    def __str__(self) -> str:
        return f"'{self.quantity}={self.share:g}'"


def meet_latency(
    budget: Budget, order: RemovalOrder, seconds: Measure, progress: bool
) -> dict[str, int]:
    """Finds counts like `meet`, but with a handful of candidates, since each is compiled and timed.

    So the budget need not be used up.

    Raises:
      ValueError: the budget cannot be met.
    """

    def counts_at(removed: float) -> dict[str, int]:
        number = round(removed * len(order))
        return order.counts(number)

    removed = latency.least_removal(
        lambda removed: seconds(counts_at(removed) if removed else {}),
        budget.share,
        progress=progress,
    )
    return counts_at(removed)


def meet(budget: Budget, order: RemovalOrder, measure: Measure) -> dict[str, int]:
    """Finds how many channels of each group stay so that the budget is met with the fewest removals.

    If there is room left, groups get one more channel, or one more multiple.

    Raises:
      ValueError: the budget cannot be met.
    """
    whole = measure({})
    least = measure(order.counts(len(order)))
    if least > budget.share * whole:
        raise ValueError(
            f'budget={budget} cannot be met: {least / whole:.4f} of the {budget.quantity} stay even if all channels go '
            'that may go; give a larger share, or loosen least, round_to, leave or allow_inexact'
        )

    def is_met(number: int) -> bool:
        return measure(order.counts(number)) <= budget.share * whole

    number = bisect.bisect_left(range(len(order)), True, key=is_met)
    counts = order.counts(number)
    # The last removal may have been a large one, such as a whole multiple.
    for more in order.with_one_more(counts, number):
        if measure({**counts, **more}) <= budget.share * whole:
            counts.update(more)
    return counts
