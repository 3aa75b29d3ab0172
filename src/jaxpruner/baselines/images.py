"""The workloads that classify images: ResNet, ViT and LeNet-300-100.

The presets train on scikit-learn's digits (`default`) and on MNIST (`data`); `full` is the
original's size, on ImageNet from disk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.baselines import data as data_lib
from jaxpruner.baselines import image_recipes, models
from jaxpruner.baselines.feeds import Feed
from jaxpruner.baselines.metrics import Metrics, classification_metrics, example_metrics
from jaxpruner.baselines.readers import pictures, pipelines
from jaxpruner.baselines.readers.imagenet import ImageFiles, read_imagenet
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Examples, Metric, PresetRecipes, Task, require_folder

_IMAGE_SHAPES = {'digits': (8, 8, 1), 'mnist': (28, 28, 1)}
_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class ImageWorkload(PresetRecipes):
    """Classifies images with one of the models."""

    name: str
    recipes: Mapping[str, Recipe]  # by preset
    make: Callable[..., Any]  # recipe, image shape, classes, rngs -> model

    def data(self, recipe: Recipe, data_dir: Path | None) -> data_lib.Images | ImageFiles:
        """As `Workload.data`; images of ImageNet stay on disk."""
        numbers: Any = recipe.task
        if recipe.data == 'digits':
            data_lib.check_no_folder(recipe.data, data_dir)
            images = data_lib.load_digits(numbers['split_seed'])
        elif recipe.data == 'mnist':
            images = data_lib.load_mnist(require_folder(recipe, data_dir, 'MNIST'))
        elif recipe.data == 'imagenet':
            return _read_files(recipe, require_folder(recipe, data_dir, 'ImageNet'))
        else:
            raise ValueError(
                f"data {recipe.data!r} cannot be read by {self.name}: 'digits', 'mnist' and "
                "'imagenet' are read; other images by a program"
            )
        return data_lib.hold_out(images, numbers['held_out'])

    def model(self, recipe: Recipe) -> models.Functional:
        """The model as pure functions; nothing is computed, so that full sizes can be looked at."""
        numbers: Any = recipe.task
        if recipe.data == 'imagenet':
            side = numbers['image_size']
            shape = side, side, 3
            classes = numbers['classes']
        else:
            shape = _IMAGE_SHAPES[recipe.data]
            classes = _CLASSES

        def make(rngs):
            return self.make(recipe, shape, classes, rngs)

        return models.Functional(make)

    def task(self, recipe: Recipe, data: data_lib.Images | ImageFiles) -> Task:
        model = self.model(recipe)
        functions = _Classification(recipe, model, data)
        task = Task(
            metric=Metric('accuracy', 'high'),
            steps=recipe.steps,
            init=model.init_params,
            init_state=lambda params, key: model.init(key)[1],
            loss=functions.loss,
            evaluate=functions.evaluate,
            filter_fn=is_kernel,
        )
        if isinstance(data, ImageFiles):
            return task._replace(
                evaluate=functions.evaluate_batch,
                feed=functions.feed,
                tests=functions.tests,
            )
        return task._replace(batch=functions.batch)


def is_kernel(path: tree_lib.Path, leaf: Any) -> bool:
    """Selects kernels: not biases, norms, the class token or embeddings of positions.

    >>> is_kernel(('head', 'kernel'), None), is_kernel(('positions',), None)
    (True, False)
    """
    del leaf
    return path[-1] == 'kernel'


def _read_files(recipe: Recipe, folder: Path) -> ImageFiles:
    files = read_imagenet(folder)
    classes = recipe.task['classes']
    if files.classes not in (None, classes):
        raise ValueError(
            f'{folder} has {files.classes} classes and task.classes is {classes}: make them equal'
        )
    return files


@dataclasses.dataclass(frozen=True)
class _Classification:
    """The functions of a task."""

    recipe: Recipe
    model: models.Functional
    data: Any  # Images, or ImageFiles

    @property
    def numbers(self) -> Any:
        return self.recipe.task

    def batch(self, key: jax.Array, step: jax.Array) -> Examples:
        """Images and labels, drawn inside the program."""
        del step
        key_choice, key_shift = jax.random.split(key)
        shape = (self.recipe.batch_size,)
        chosen = jax.random.randint(key_choice, shape, 0, len(self.data.x_train))
        images = self.data.x_train[chosen]
        labels = self.data.y_train[chosen]
        return _shifted(images, key_shift, self.numbers['shift']), labels

    def loss(self, params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        del key
        images, labels = _images_and_labels(batch)
        logits, state = self.model.apply(params, state, images, train=True)
        one_hot = jax.nn.one_hot(labels, logits.shape[-1])
        targets = optax.smooth_labels(one_hot, self.numbers['label_smoothing'])
        losses = optax.softmax_cross_entropy(logits, targets)
        return losses.mean(), state

    def evaluate(self, params: Any, state: Any) -> Metrics:
        """Mean metrics of all test images."""

        def logits(images):
            return self._logits(params, state, images)

        return classification_metrics(logits, self.data.x_test, self.data.y_test)

    def evaluate_batch(self, params: Any, state: Any, batch: Any) -> Metrics:
        """The metrics of each image of a batch."""
        images, labels = _images_and_labels(batch)
        logits = self._logits(params, state, images)
        return example_metrics(logits, labels)

    def feed(self, seed: int) -> Feed:
        part = functools.partial(pictures.random_part, size=self.numbers['image_size'])
        return pipelines.mixed(self.data.train, part, self.recipe.batch_size, seed)

    def tests(self) -> Iterator[Any]:
        middle = functools.partial(pictures.middle, size=self.numbers['image_size'])
        return pipelines.in_order(self.data.test, middle, self.recipe.batch_size)

    def _logits(self, params: Any, state: Any, images: jax.Array) -> jax.Array:
        logits, _ = self.model.apply(params, state, images, train=False)
        return logits


def _images_and_labels(batch: Any) -> Examples:
    """A pair as it is; pictures of a feed are normalized here, so that bytes go to the device."""
    if not isinstance(batch, dict):
        return batch
    mean = jnp.array(pictures.MEAN)
    deviation = jnp.array(pictures.DEVIATION)
    pixels = batch['image'] / 255.0
    return (pixels - mean) / deviation, batch['label']


def _shifted(images: jax.Array, key: jax.Array, most: Any) -> jax.Array:
    """Moves each image by up to `most` pixels, its edges repeated."""
    if not most:
        return images
    margin = (most, most)
    none = (0, 0)
    padded = jnp.pad(images, (none, margin, margin, none), mode='edge')
    positions = 2 * most + 1
    corners = jax.random.randint(key, (len(images), 2), 0, positions)
    image_shape = images.shape[1:]

    def cut(image, corner):
        return jax.lax.dynamic_slice(image, (*corner, 0), image_shape)

    return jax.vmap(cut)(padded, corners)


def _make_resnet(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.ResNet:
    sizes: Any = recipe.model
    return models.ResNet(shape[-1], classes=classes, dtype=recipe.dtype, rngs=rngs, **sizes)


def _make_vit(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.ViT:
    sizes: Any = recipe.model
    height, width, channels = shape
    image = height, width, channels
    return models.ViT(image, classes=classes, dtype=recipe.dtype, rngs=rngs, **sizes)


def _make_lenet(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.LeNet:
    hidden: Any = recipe.model['hidden']
    inputs = math.prod(shape)
    return models.LeNet(inputs, hidden, classes, recipe.dtype, rngs=rngs)


RESNET = ImageWorkload('resnet', image_recipes.RESNET, _make_resnet)
VIT = ImageWorkload('vit', image_recipes.VIT, _make_vit)
LENET = ImageWorkload('lenet', image_recipes.LENET, _make_lenet)
