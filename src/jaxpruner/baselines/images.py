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

from jaxpruner.baselines import data as data_lib
from jaxpruner.baselines import image_recipes, models
from jaxpruner.baselines.feeds import Feed
from jaxpruner.baselines.metrics import classification_metrics, example_metrics
from jaxpruner.baselines.readers import pictures, pipelines
from jaxpruner.baselines.readers.imagenet import ImageFiles, read_imagenet
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Metric, PresetRecipes, Task, require_folder
from jaxpruner.core import tree as tree_lib

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
            shape = numbers['image_size'], numbers['image_size'], 3
            classes = numbers['classes']
        else:
            shape, classes = _IMAGE_SHAPES[recipe.data], _CLASSES
        return models.Functional(lambda rngs: self.make(recipe, shape, classes, rngs))

    def task(self, recipe: Recipe, data: data_lib.Images | ImageFiles) -> Task:
        model = self.model(recipe)
        task = Task(
            metric=Metric('accuracy', 'high'),
            steps=recipe.steps,
            init=model.init_params,
            init_state=lambda params, key: model.init(key)[1],
            loss=functools.partial(_loss, recipe, model),
            evaluate=functools.partial(_evaluate_batch, model),
            filter_fn=is_kernel,
        )
        if isinstance(data, ImageFiles):
            feed = functools.partial(_feed, recipe, data)
            return task._replace(feed=feed, tests=functools.partial(_tests, recipe, data))
        evaluate = functools.partial(_evaluate_all, model, data)
        return task._replace(batch=functools.partial(_batch, recipe, data), evaluate=evaluate)


def is_kernel(path: tree_lib.Path, leaf: Any) -> bool:
    """Selects kernels: not biases, norms, the class token or embeddings of positions.

    >>> is_kernel(('head', 'kernel'), None), is_kernel(('positions',), None)
    (True, False)
    """
    del leaf
    return path[-1] == 'kernel'


def _read_files(recipe: Recipe, folder: Path) -> ImageFiles:
    files, classes = read_imagenet(folder), recipe.task['classes']
    if files.classes not in (None, classes):
        raise ValueError(
            f'{folder} has {files.classes} classes and task.classes is {classes}: make them equal'
        )
    return files


def _batch(
    recipe: Recipe, data: data_lib.Images, key: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Images and labels, drawn inside the program."""
    del step
    key_choice, key_shift = jax.random.split(key)
    shape = (recipe.batch_size,)
    chosen = jax.random.randint(key_choice, shape, 0, len(data.x_train))
    images = _shifted(data.x_train[chosen], key_shift, recipe.task['shift'])
    return images, data.y_train[chosen]


def _loss(
    recipe: Recipe, model: models.Functional, params: Any, state: Any, batch: Any, key: jax.Array
) -> tuple[jax.Array, Any]:
    del key
    images, labels = _images_and_labels(batch)
    logits, state = model.apply(params, state, images, train=True)
    smoothing: Any = recipe.task['label_smoothing']
    one_hot = jax.nn.one_hot(labels, logits.shape[-1])
    targets = optax.smooth_labels(one_hot, smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean(), state


def _evaluate_all(
    model: models.Functional, data: data_lib.Images, params: Any, state: Any
) -> dict[str, jax.Array]:
    """Mean metrics of all test images."""

    def logits(images):
        return model.apply(params, state, images, train=False)[0]

    return classification_metrics(logits, data.x_test, data.y_test)


def _evaluate_batch(
    model: models.Functional, params: Any, state: Any, batch: Any
) -> dict[str, jax.Array]:
    """The metrics of each image of a batch."""
    images, labels = _images_and_labels(batch)
    return example_metrics(model.apply(params, state, images, train=False)[0], labels)


def _feed(recipe: Recipe, files: ImageFiles, seed: int) -> Feed:
    size: Any = recipe.task['image_size']
    part = functools.partial(pictures.random_part, size=size)
    return pipelines.mixed(files.train, part, recipe.batch_size, seed)


def _tests(recipe: Recipe, files: ImageFiles) -> Iterator[Any]:
    size: Any = recipe.task['image_size']
    middle = functools.partial(pictures.middle, size=size)
    return pipelines.in_order(files.test, middle, recipe.batch_size)


def _images_and_labels(batch: Any) -> tuple[jax.Array, jax.Array]:
    """A pair as it is; pictures of a feed are normalized here, so that bytes go to the device."""
    if not isinstance(batch, dict):
        return batch
    pixels = batch['image'] / 255.0
    images = (pixels - jnp.array(pictures.MEAN)) / jnp.array(pictures.DEVIATION)
    return images, batch['label']


def _shifted(images: jax.Array, key: jax.Array, most: Any) -> jax.Array:
    """Moves each image by up to `most` pixels, its edges repeated."""
    if not most:
        return images
    margin = (most, most)
    padded = jnp.pad(images, ((0, 0), margin, margin, (0, 0)), mode='edge')
    corners = jax.random.randint(key, (len(images), 2), 0, 2 * most + 1)

    def cut(image, corner):
        return jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])

    return jax.vmap(cut)(padded, corners)


def _make_resnet(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.ResNet:
    sizes: Any = recipe.model
    return models.ResNet(shape[-1], classes=classes, dtype=recipe.dtype, rngs=rngs, **sizes)


def _make_vit(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.ViT:
    sizes: Any = recipe.model
    image = shape[0], shape[1], shape[2]
    return models.ViT(image, classes=classes, dtype=recipe.dtype, rngs=rngs, **sizes)


def _make_lenet(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.LeNet:
    hidden: Any = recipe.model['hidden']
    return models.LeNet(math.prod(shape), hidden, classes, recipe.dtype, rngs=rngs)


RESNET = ImageWorkload('resnet', image_recipes.RESNET, _make_resnet)
VIT = ImageWorkload('vit', image_recipes.VIT, _make_vit)
LENET = ImageWorkload('lenet', image_recipes.LENET, _make_lenet)
