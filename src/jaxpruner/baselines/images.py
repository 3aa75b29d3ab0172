"""The workloads that classify images, ResNet, ViT and LeNet-300-100, and their recipes.

The presets train on scikit-learn's digits (`default`) and on MNIST (`data`); `full` is the original's size, on ImageNet
from disk. The numbers of the small ones were fixed before algorithms were compared, after one dense training of each
model on the digits.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.baselines import data as data_lib
from jaxpruner.baselines import models, readers
from jaxpruner.baselines import task as task_lib
from jaxpruner.baselines.readers import ImageFiles
from jaxpruner.baselines.recipe import Optimizer, Pruning, Recipe, Schedule
from jaxpruner.baselines.task import Examples, Feed, Metric, Metrics, Task, Workload

_TASK = {'held_out': 0.0, 'label_smoothing': 0.0}
_ERK = Pruning(distribution='erk')
_RESNET = Recipe(
    workload='resnet',
    steps=600,
    batch_size=64,
    optimizer=Optimizer('sgd', learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    schedule=Schedule(warmup=0.05, decay='cosine'),
    pruning=_ERK,
    model={'stages': (1, 1, 1), 'width': 16, 'bottleneck': False, 'large_stem': False},
    task=_TASK,
)
_VIT = Recipe(
    workload='vit',
    steps=800,
    batch_size=64,
    optimizer=Optimizer('adamw', learning_rate=2e-3, weight_decay=0.05, clip_norm=1.0),
    schedule=Schedule(warmup=0.1, decay='cosine'),
    pruning=_ERK,
    model={'patch': 2, 'width': 48, 'layers': 3, 'heads': 4, 'hidden': 96},
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
    pruning=Pruning(distribution='erk', frequency=0.01, trainer_end=1.0, drop_fraction=0.5),
    model={'hidden': (300, 100)},
    task={**_TASK, 'held_out': 0.1},
)
_MNIST = {'preset': 'data', 'data': 'mnist', 'steps': 4000, 'batch_size': 128}


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


_RESNET_RECIPES = {
    'default': _RESNET,
    'data': _RESNET.updated(_MNIST),
    'full': _on_imagenet(
        _RESNET,
        Optimizer('sgd', learning_rate=0.4, momentum=0.9, nesterov=True, weight_decay=1e-4),
        {'stages': (3, 4, 6, 3), 'width': 64, 'bottleneck': True, 'large_stem': True},
    ),
}
_VIT_RECIPES = {
    'default': _VIT,
    'data': _VIT.updated({**_MNIST, 'model': {'patch': 4}}),
    'full': _on_imagenet(
        _VIT,
        Optimizer('adamw', learning_rate=1e-3, weight_decay=0.1, clip_norm=1.0),
        {'patch': 16, 'width': 768, 'layers': 12, 'heads': 12, 'hidden': 3072},
    ),
}
_LENET_RECIPES = {
    'data': _LENET,
    'default': dataclasses.replace(
        _LENET,
        preset='default',
        data='digits',
        steps=1000,
        pruning=Pruning(distribution='erk', drop_fraction=0.5),
    ),
}


@dataclasses.dataclass(frozen=True)
class ImageWorkload(Workload):
    """Classifies images with one of the models."""

    name: str
    recipes: Mapping[str, Recipe]  # by preset
    make: Callable[..., Any]  # image shape, classes, dtype, rngs, `Recipe.model` -> model

    def data(self, recipe: Recipe, data_dir: Path | None) -> data_lib.Images | ImageFiles:
        """As `Workload.data`; images of ImageNet stay on disk."""
        if recipe.data != 'imagenet':
            images = data_lib.load_images(recipe, data_dir, 'imagenet')
            return data_lib.hold_out(images, recipe.task['held_out'])
        folder = data_lib.require_folder(recipe, data_dir, 'ImageNet')
        files, classes = readers.read_imagenet(folder), recipe.task['classes']
        if files.classes != classes:
            raise ValueError(
                f'{folder} has {files.classes} classes and task.classes is {classes}: make them equal'
            )
        return files

    def model(self, recipe: Recipe) -> models.Functional:
        """The model as pure functions; nothing is computed, so that full sizes can be looked at."""
        side, classes = recipe.task.get('image_size'), recipe.task.get('classes', 10)
        shapes = {'digits': (8, 8, 1), 'mnist': (28, 28, 1), 'imagenet': (side, side, 3)}
        shape = shapes[recipe.data]
        sizes = {**recipe.model, 'classes': classes, 'dtype': recipe.dtype}
        return models.Functional(lambda rngs: self.make(shape, **sizes, rngs=rngs))

    def task(self, recipe: Recipe, data: data_lib.Images | ImageFiles) -> Task:
        model = self.model(recipe)
        functions = _Classification(recipe, model, data)
        task = Task(
            metric=Metric('accuracy', 'high'),
            init=model.init_params,
            init_state=lambda params, key: model.init(key)[1],
            loss=functions.loss,
            evaluate=functions.evaluate,
            filter_fn=is_kernel,
        )
        if isinstance(data, ImageFiles):
            return task._replace(feed=functions.feed, tests=functions.tests)
        return task._replace(batch=functions.batch)


def is_kernel(path: tree_lib.Path, leaf: Any) -> bool:
    """Selects kernels: not biases, norms, the class token or embeddings of positions.

    >>> is_kernel(('head', 'kernel'), None), is_kernel(('positions',), None)
    (True, False)
    """
    del leaf
    return path[-1] == 'kernel'


@dataclasses.dataclass(frozen=True)
class _Classification:
    """The functions of a task."""

    recipe: Recipe
    model: models.Functional
    data: Any  # Images, or ImageFiles

    def batch(self, key: jax.Array, step: jax.Array) -> Examples:
        """Images and labels, drawn inside the program."""
        del step
        key, _ = jax.random.split(key)
        chosen = jax.random.randint(key, (self.recipe.batch_size,), 0, len(self.data.x_train))
        return self.data.x_train[chosen], self.data.y_train[chosen]

    def loss(self, params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        del key
        images, labels = _images_and_labels(batch)
        logits, state = self.model.apply(params, state, images, train=True)
        one_hot = jax.nn.one_hot(labels, logits.shape[-1])
        targets = optax.smooth_labels(one_hot, self.recipe.task['label_smoothing'])
        return optax.softmax_cross_entropy(logits, targets).mean(), state

    def evaluate(self, params: Any, state: Any, *batch: Any) -> Metrics:
        """Mean metrics of all test images, or those of each image of a batch."""

        def model(images):
            logits, _ = self.model.apply(params, state, images, train=False)
            return logits

        if batch:
            images, labels = _images_and_labels(*batch)
            return task_lib.example_metrics(model(images), labels)
        return task_lib.classification_metrics(model, self.data.x_test, self.data.y_test)

    def feed(self, seed: int) -> Feed:
        part = functools.partial(readers.random_part, size=self.recipe.task['image_size'])
        return readers.mixed(self.data.train, part, self.recipe.batch_size, seed)

    def tests(self) -> Iterator[Any]:
        middle = functools.partial(readers.middle, size=self.recipe.task['image_size'])
        return readers.in_order(self.data.test, middle, self.recipe.batch_size)


def _images_and_labels(batch: Any) -> Examples:
    """A pair as it is; pictures of a feed are normalized here, so that bytes go to the device."""
    if not isinstance(batch, dict):
        return batch
    mean, deviation = jnp.array(readers.MEAN), jnp.array(readers.DEVIATION)
    return (batch['image'] / 255.0 - mean) / deviation, batch['label']


RESNET = ImageWorkload('resnet', _RESNET_RECIPES, models.ResNet)
VIT = ImageWorkload('vit', _VIT_RECIPES, models.ViT)
LENET = ImageWorkload('lenet', _LENET_RECIPES, models.LeNet)
