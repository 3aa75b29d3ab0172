"""The workloads that classify images, ResNet, ViT and LeNet-300-100.

The presets train on scikit-learn's digits (`default`) and on MNIST (`data`); `full` is the original's size, on ImageNet
from disk.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.baselines import data as data_lib
from jaxpruner.baselines import models, readers
from jaxpruner.baselines import task as task_lib
from jaxpruner.baselines.readers import ImageFiles
from jaxpruner.baselines.recipe import Recipe, read_presets
from jaxpruner.baselines.task import Examples, Feed, Metric, Metrics, Task, Values, Workload


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
            own = {'values': functions.values, 'evaluate_host': functions.evaluate_host}
            return task._replace(feed=functions.feed, **own)
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

    def evaluate(self, params: Any, state: Any) -> Metrics:
        def model(images):
            return self.model.apply(params, state, images, train=False)[0]

        return task_lib.classification_metrics(model, self.data.x_test, self.data.y_test)

    def feed(self, seed: int) -> Feed:
        part = functools.partial(readers.random_part, size=self.recipe.task['image_size'])
        return readers.mixed(self.data.train, part, self.recipe.batch_size, seed)

    def values(self, params: Any, state: Any, batch: Any) -> Metrics:
        """The metrics of each image of a batch from the host."""
        images, labels = _images_and_labels(batch)
        logits, _ = self.model.apply(params, state, images, train=False)
        return task_lib.example_metrics(logits, labels)

    def evaluate_host(self, values: Values, seed: int) -> dict[str, float]:
        """Mean metrics of the test images on disk."""
        del seed
        totals: dict[str, float] = collections.defaultdict(float)
        middle = functools.partial(readers.middle, size=self.recipe.task['image_size'])
        for batch in readers.in_order(self.data.test, middle, self.recipe.batch_size):
            for name, each in values(batch).items():
                totals[name] += each.sum(dtype=np.float64)
        count = len(self.data.test)
        return {name: float(np.float32(total / count)) for name, total in totals.items()}


def _images_and_labels(batch: Any) -> Examples:
    """A pair as it is; pictures of a feed are normalized here, so that bytes go to the device."""
    if not isinstance(batch, dict):
        return batch
    mean, deviation = jnp.array(readers.MEAN), jnp.array(readers.DEVIATION)
    return (batch['image'] / 255.0 - mean) / deviation, batch['label']


RESNET = ImageWorkload('resnet', read_presets('resnet'), models.ResNet)
VIT = ImageWorkload('vit', read_presets('vit'), models.ViT)
LENET = ImageWorkload('lenet', read_presets('lenet'), models.LeNet)
