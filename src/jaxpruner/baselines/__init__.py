"""The workloads on which algorithms are compared: recipes, tasks, training, sweeps."""

from jaxpruner.baselines import images
from jaxpruner.baselines.task import Workload

# A new workload is one file and one row.
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (images.RESNET, images.VIT, images.LENET)}
