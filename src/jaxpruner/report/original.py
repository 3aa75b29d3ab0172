"""The table of baselines that the original JaxPruner published, at 80 % sparsity, as data.

A missing algorithm was not run there. Values are accuracies in per cent, T5's a loss and DQN's a return.
"""

from typing import Literal, NamedTuple

SPARSITY = 0.8


class OriginalRow(NamedTuple):
    """One row of the original's table.

    >>> OriginalRow('resnet', 'high', {'no_prune': 76.67, 'random': 70.192}).values['random']
    70.192
    """

    workload: str  # ours that stands for it
    better: Literal['high', 'low']
    values: dict[str, float]  # by algorithm


ORIGINAL: dict[str, OriginalRow] = {
    'ResNet-50': OriginalRow(
        'resnet',
        'high',
        {
            'no_prune': 76.67,
            'random': 70.192,
            'magnitude': 75.532,
            'saliency': 74.93,
            'global_magnitude': 75.486,
            'magnitude_ste': 73.542,
            'static_sparse': 71.344,
            'set': 74.566,
            'rigl': 74.752,
        },
    ),
    'ViT-B/16 (90ep)': OriginalRow(
        'vit',
        'high',
        {
            'no_prune': 74.044,
            'random': 69.756,
            'magnitude': 72.892,
            'saliency': 72.802,
            'global_magnitude': 73.598,
            'magnitude_ste': 74.208,
            'static_sparse': 64.61,
            'set': 70.982,
            'rigl': 71.582,
        },
    ),
    'ViT-B/16 (300ep)': OriginalRow(
        'vit',
        'high',
        {
            'no_prune': 74.842,
            'random': 73.428,
            'magnitude': 75.734,
            'saliency': 75.95,
            'global_magnitude': 75.652,
            'magnitude_ste': 76.128,
            'static_sparse': 70.168,
            'set': 75.616,
            'rigl': 75.64,
        },
    ),
    'Fed. MNIST': OriginalRow(
        'federated',
        'high',
        {
            'no_prune': 86.21,
            'random': 83.53,
            'magnitude': 85.74,
            'saliency': 85.60,
            'global_magnitude': 86.01,
            'magnitude_ste': 86.16,
            'static_sparse': 83.33,
            'set': 84.20,
            'rigl': 84.64,
        },
    ),
    't5-Base (C4)': OriginalRow(
        't5',
        'low',
        {
            'no_prune': 2.58399,
            'random': 3.28813,
            'magnitude': 2.95402,
            'saliency': 3.52233,
            'global_magnitude': 5.43968,
            'magnitude_ste': 2.7124,
            'static_sparse': 3.17343,
            'set': 3.13115,
            'rigl': 3.12403,
        },
    ),
    'DQN-CNN (MsPacman)': OriginalRow(
        'dqn',
        'high',
        {
            'no_prune': 2588.82,
            'random': 1435.29,
            'magnitude': 2123.83,
            'global_magnitude': 2322.21,
            'static_sparse': 1156.69,
            'set': 1723.3,
            'rigl': 1535.19,
        },
    ),
}
