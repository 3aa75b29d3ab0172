"""The workloads on which algorithms are compared: recipes, tasks, training, sweeps."""

from jaxpruner.baselines import dqn, federated, images, t5
from jaxpruner.baselines.task import Workload

# A new workload is one file, one row, and its recipes in `presets/`.
_ALL: tuple[Workload, ...] = (
    images.RESNET,
    images.VIT,
    images.LENET,
    federated.FederatedWorkload(),
    t5.T5Workload(),
    dqn.DQNWorkload(),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
