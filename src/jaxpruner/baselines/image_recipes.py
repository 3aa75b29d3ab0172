"""The recipes of the workloads that classify images, by preset.

The numbers of the small ones were fixed before algorithms were compared, after one dense training
of each model on the digits.
"""

import dataclasses

from jaxpruner.baselines.recipe import Optimizer, Pruning, Recipe, Schedule

_TASK = {
    'split_seed': 0,
    'held_out': 0.0,
    'shift': 0,
    'label_smoothing': 0.0,
}
_ERK = Pruning(distribution='erk')
_RESNET = Recipe(
    workload='resnet',
    steps=600,
    batch_size=64,
    optimizer=Optimizer(
        'sgd',
        learning_rate=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
    ),
    schedule=Schedule(warmup=0.05, decay='cosine'),
    pruning=_ERK,
    model={
        'stages': (1, 1, 1),
        'width': 16,
        'bottleneck': False,
        'large_stem': False,
    },
    task=_TASK,
)
_VIT = Recipe(
    workload='vit',
    steps=800,
    batch_size=64,
    optimizer=Optimizer(
        'adamw',
        learning_rate=2e-3,
        weight_decay=0.05,
        clip_norm=1.0,
    ),
    schedule=Schedule(warmup=0.1, decay='cosine'),
    pruning=_ERK,
    model={
        'patch': 2,
        'width': 48,
        'layers': 3,
        'heads': 4,
        'hidden': 96,
    },
    task=_TASK,
)
# Dettmers and Zettlemoyer's sparse-learning, from memory and not compared with its code: a tenth
# of the training images is held out, Nesterov's momentum, a rate that falls to a tenth after 25,000
# and 50,000 of 54,000 batches (100 epochs), L2 on every parameter, masks sparse from the beginning,
# changed once an epoch with a drop fraction that begins at 0.5 and falls along a cosine. SET is
# defined on random graphs of Erdős and Rényi, in which narrow layers are denser.
_LENET = Recipe(
    workload='lenet',
    preset='data',
    data='mnist',
    steps=54_000,
    batch_size=100,
    optimizer=Optimizer(
        'sgd', 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, decay_kernels_only=False
    ),
    schedule=Schedule(decay='steps', boundaries=(25 / 54, 50 / 54)),
    pruning=Pruning(
        distribution='erk',
        frequency=0.01,
        trainer_end=1.0,
        drop_fraction=0.5,
    ),
    model={'hidden': (300, 100)},
    task={**_TASK, 'held_out': 0.1},
)
_MNIST = {
    'preset': 'data',
    'data': 'mnist',
    'steps': 4000,
    'batch_size': 128,
}


def _on_imagenet(recipe: Recipe, optimizer: Optimizer, model: dict) -> Recipe:
    return dataclasses.replace(
        recipe,
        preset='full',
        data='imagenet',
        steps=112_590,  # 90 epochs of 1,281,167 images
        batch_size=1024,
        eval_every=0.01,
        dtype='bfloat16',
        optimizer=optimizer,
        pruning=Pruning(distribution='erk', frequency=0.01),
        model=model,
        task={'image_size': 224, 'classes': 1000, 'label_smoothing': 0.1},
    )


RESNET = {
    'default': _RESNET,
    'data': _RESNET.updated(_MNIST),
    'full': _on_imagenet(
        _RESNET,
        Optimizer(
            'sgd',
            learning_rate=0.4,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
        ),
        {
            'stages': (3, 4, 6, 3),
            'width': 64,
            'bottleneck': True,
            'large_stem': True,
        },
    ),
}
VIT = {
    'default': _VIT,
    'data': _VIT.updated({**_MNIST, 'model': {'patch': 4}}),
    'full': _on_imagenet(
        _VIT,
        Optimizer(
            'adamw',
            learning_rate=1e-3,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        {
            'patch': 16,
            'width': 768,
            'layers': 12,
            'heads': 12,
            'hidden': 3072,
        },
    ),
}
LENET = {
    'data': _LENET,
    'default': dataclasses.replace(
        _LENET,
        preset='default',
        data='digits',
        steps=1000,
        pruning=Pruning(distribution='erk', drop_fraction=0.5),
    ),
}
