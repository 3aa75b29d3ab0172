"""What WORKLOAD means on the command line: a workload, or one with the data of a preset before it, as in mnist-vit."""

from typing import NamedTuple

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.task import Workload
from jaxpruner.tree import nearest


class NamedWorkload(NamedTuple):
    """What a name means."""

    workload: Workload
    data: str | None = None  # that stand in the name
    preset: str | None = None  # the first that trains on them


def find_workload(name: str) -> NamedWorkload:
    """Finds the workload of a name, and the preset that it asks for.

    Raises:
      ValueError: there is no such name; the message lists the nearest.

    >>> find_workload('mnist-vit').preset
    'data'
    """
    named = {workload.name: NamedWorkload(workload) for workload in WORKLOADS.values()}
    for workload in WORKLOADS.values():
        for preset in workload.presets:
            data = workload.default(preset).data
            named.setdefault(f'{data}-{workload.name}', NamedWorkload(workload, data, preset))
    if name not in named:
        raise ValueError(f'there is no workload {name!r}; {nearest(name, named)}')
    return named[name]
