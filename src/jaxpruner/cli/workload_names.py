"""What WORKLOAD means on the command line: a workload, or one with the data of a preset before it, as in mnist-vit."""

from typing import NamedTuple

from jaxpruner.baselines import WORKLOADS
from jaxpruner.baselines.task import Workload
from jaxpruner.core.tree import nearest


class Named(NamedTuple):
    """What a name means.

    >>> Named(WORKLOADS['vit'], 'mnist', 'data').preset
    'data'
    """

    workload: Workload
    data: str | None = None  # that stand in the name
    preset: str | None = None  # the first that trains on them


def find_workload(name: str) -> Named:
    """The workload of a name, and the preset that it asks for.

    Args:
      name: `'vit'`, or `'mnist-vit'` for its preset that trains on MNIST.

    Raises:
      ValueError: there is no such name; the message lists the nearest.

    >>> find_workload('mnist-vit').preset
    'data'
    """
    names = {workload.name: Named(workload) for workload in WORKLOADS.values()}
    for workload in WORKLOADS.values():
        for preset in workload.presets:
            data = workload.default(preset).data
            names.setdefault(f'{data}-{workload.name}', Named(workload, data, preset))
    if name not in names:
        raise ValueError(f'there is no workload {name!r}; {nearest(name, names)}')
    return names[name]
