"""The table of baselines that the original JaxPruner published, at 80 % sparsity, as data."""

from typing import NamedTuple

from jaxpruner.report.experiments import ALGORITHM_ORDER

SPARSITY = 0.8

# The original's row; our workload that stands for it; which values are good; a value for each of `ALGORITHM_ORDER`,
# `-` where the original ran nothing. Values are accuracies in per cent, T5's a loss and DQN's a return.
_TABLE = """
ResNet-50          | resnet    | high |   76.67  70.192  75.532   74.93  75.486  73.542  71.344  74.566  74.752
ViT-B/16 (90ep)    | vit       | high |  74.044  69.756  72.892  72.802  73.598  74.208   64.61  70.982  71.582
ViT-B/16 (300ep)   | vit       | high |  74.842  73.428  75.734   75.95  75.652  76.128  70.168  75.616   75.64
Fed. MNIST         | federated | high |   86.21   83.53   85.74   85.60   86.01   86.16   83.33   84.20   84.64
t5-Base (C4)       | t5        | low  | 2.58399 3.28813 2.95402 3.52233 5.43968  2.7124 3.17343 3.13115 3.12403
DQN-CNN (MsPacman) | dqn       | high | 2588.82 1435.29 2123.83       - 2322.21       - 1156.69  1723.3 1535.19
"""


class OriginalRow(NamedTuple):
    """One row of the original's table."""

    workload: str
    better: str  # 'high' or 'low'
    values: dict[str, float]  # by algorithm


def _read_table() -> dict[str, OriginalRow]:
    rows = {}
    for line in _TABLE.strip().splitlines():
        name, workload, better, texts = map(str.strip, line.split('|'))
        values = {}
        for algorithm, text in zip(ALGORITHM_ORDER, texts.split(), strict=True):
            if text != '-':
                values[algorithm] = float(text)
        rows[name] = OriginalRow(workload, better, values)
    return rows


ORIGINAL: dict[str, OriginalRow] = _read_table()
