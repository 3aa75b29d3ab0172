"""The workloads that classify images: ResNet, ViT and LeNet-300-100.

The presets train on scikit-learn's digits (`default`) and on MNIST (`data`); `full` is the original's size, on ImageNet
from disk. Numbers of the small ones were fixed before algorithms were compared, after one dense training of each model
on the digits.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpruner.baselines import data as data_lib
from jaxpruner.baselines import models
from jaxpruner.baselines.feeds import Feed
from jaxpruner.baselines.metrics import classification_metrics, example_metrics
from jaxpruner.baselines.readers import pictures, pipelines
from jaxpruner.baselines.readers.imagenet import ImageFiles, read_imagenet
from jaxpruner.baselines.recipe import Optimizer, Pruning, Recipe, Schedule
from jaxpruner.baselines.task import Metric, Task
from jaxpruner.core import tree as tree_lib

_IMAGE_SHAPES = {'digits': (8, 8, 1), 'mnist': (28, 28, 1)}
_CLASSES = 10
_FOLDERS = {'mnist': 'MNIST', 'imagenet': 'ImageNet'}


@dataclasses.dataclass(frozen=True)
class ImageWorkload:
    """Classifies images with one of the models."""

    name: str
    recipes: Mapping[str, Recipe]  # by preset
    make: Callable[..., Any]  # recipe, image shape, classes, rngs -> model

    @property
    def presets(self) -> tuple[str, ...]:
        """The names of the recipes."""
        return tuple(self.recipes)

    def default(self, preset: str) -> Recipe:
        """As `Workload.default`."""
        if preset not in self.recipes:
            raise ValueError(
                f'{self.name} has no preset {preset!r}; {tree_lib.nearest(preset, self.recipes)}'
            )
        return self.recipes[preset]

    def data(self, recipe: Recipe, data_dir: Path | None) -> data_lib.Images | ImageFiles:
        """As `Workload.data`: digits need no folder, MNIST and ImageNet do; images of ImageNet stay on disk."""
        if recipe.data == 'digits':
            data_lib.check_no_folder(recipe.data, data_dir)
            return data_lib.hold_out(
                data_lib.load_digits(_number(recipe, 'split_seed')), _number(recipe, 'held_out')
            )
        if recipe.data not in _FOLDERS:
            known = "'digits', 'mnist' and 'imagenet' are read"
            raise ValueError(
                f'data {recipe.data!r} cannot be read by {self.name}: {known}; other images by a program'
            )
        if data_dir is None:
            what = _FOLDERS[recipe.data]
            raise ValueError(
                f'the preset {recipe.preset!r} of {self.name} needs --data-dir: a folder with {what}'
            )
        if recipe.data == 'mnist':
            return data_lib.hold_out(data_lib.load_mnist(data_dir), _number(recipe, 'held_out'))
        files, classes = read_imagenet(data_dir), _number(recipe, 'classes')
        if files.classes not in (None, classes):
            raise ValueError(
                f'{data_dir} has {files.classes} classes and task.classes is {classes}: make them equal'
            )
        return files

    def model(self, recipe: Recipe) -> models.Functional:
        """The model as pure functions; nothing is computed, so that full sizes can be looked at."""
        if recipe.data == 'imagenet':
            side = _number(recipe, 'image_size')
            shape, classes = (side, side, 3), _number(recipe, 'classes')
        else:
            shape, classes = _IMAGE_SHAPES[recipe.data], _CLASSES
        return models.Functional(lambda rngs: self.make(recipe, shape, classes, rngs))

    def task(self, recipe: Recipe, data: data_lib.Images | ImageFiles) -> Task:
        """As `Workload.task`."""
        if isinstance(data, ImageFiles):
            return self._fed_task(recipe, data)
        model = self.model(recipe)

        def batch(key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
            del step
            draw, move = jax.random.split(key)
            chosen = jax.random.randint(draw, (recipe.batch_size,), 0, len(data.x_train))
            return _shifted(data.x_train[chosen], move, _number(recipe, 'shift')), data.y_train[
                chosen
            ]

        def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            del key
            return _loss(recipe, model, params, state, *batch)

        def evaluate(params: Any, state: Any) -> dict[str, jax.Array]:
            def logits(images: jax.Array) -> jax.Array:
                return model.apply(params, state, images, train=False)[0]

            return classification_metrics(logits, data.x_test, data.y_test)

        return Task(
            metric=Metric('accuracy', 'high'),
            steps=recipe.steps,
            init=lambda key: model.init(key)[0],
            init_state=lambda params, key: model.init(key)[1],
            batch=batch,
            loss=loss,
            evaluate=evaluate,
            filter_fn=is_kernel,
        )

    def _fed_task(self, recipe: Recipe, files: ImageFiles) -> Task:
        model, size = self.model(recipe), _number(recipe, 'image_size')

        def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            del key
            return _loss(recipe, model, params, state, _normalized(batch['image']), batch['label'])

        def evaluate(params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
            logits = model.apply(params, state, _normalized(batch['image']), train=False)[0]
            return example_metrics(logits, batch['label'])

        def feed(seed: int) -> Feed:
            part = functools.partial(pictures.random_part, size=size)
            return pipelines.mixed(files.train, part, recipe.batch_size, seed)

        def tests() -> Iterator[Any]:
            return pipelines.in_order(
                files.test, functools.partial(pictures.middle, size=size), recipe.batch_size
            )

        return Task(
            metric=Metric('accuracy', 'high'),
            steps=recipe.steps,
            init=lambda key: model.init(key)[0],
            init_state=lambda params, key: model.init(key)[1],
            batch=lambda key, step: None,
            loss=loss,
            evaluate=evaluate,
            filter_fn=is_kernel,
            feed=feed,
            tests=tests,
        )


def is_kernel(path: tree_lib.Path, leaf: Any) -> bool:
    """Selects kernels: not biases, norms, the class token or embeddings of positions.

    >>> is_kernel(('head', 'kernel'), None), is_kernel(('positions',), None)
    (True, False)
    """
    del leaf
    return path[-1] == 'kernel'


def _number(recipe: Recipe, key: str) -> Any:
    return recipe.task[key]


def _loss(
    recipe: Recipe,
    model: models.Functional,
    params: Any,
    state: Any,
    images: jax.Array,
    labels: jax.Array,
) -> tuple[jax.Array, Any]:
    logits, state = model.apply(params, state, images, train=True)
    smoothing: Any = recipe.task['label_smoothing']
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean(), state


def _normalized(pixels: jax.Array) -> jax.Array:
    """On the device, so that bytes are what goes there."""
    return (pixels / 255.0 - jnp.array(pictures.MEAN)) / jnp.array(pictures.DEVIATION)


def _shifted(images: jax.Array, key: jax.Array, most: Any) -> jax.Array:
    """Moves each image by up to `most` pixels, its edges repeated."""
    if not most:
        return images
    padded = jnp.pad(images, ((0, 0), (most, most), (most, most), (0, 0)), mode='edge')
    at = jax.random.randint(key, (len(images), 2), 0, 2 * most + 1)
    cut = jax.vmap(
        lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), images.shape[1:])
    )
    return cut(padded, at)


def _make_resnet(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.ResNet:
    sizes: Any = recipe.model
    return models.ResNet(shape[-1], classes=classes, dtype=recipe.dtype, rngs=rngs, **sizes)


def _make_vit(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.ViT:
    sizes: Any = recipe.model
    image = shape[0], shape[1], shape[2]
    return models.ViT(image, classes=classes, dtype=recipe.dtype, rngs=rngs, **sizes)


def _make_lenet(recipe: Recipe, shape: tuple[int, ...], classes: int, rngs: Any) -> models.LeNet:
    hidden: Any = recipe.model['hidden']
    return models.LeNet(shape[0] * shape[1] * shape[2], hidden, classes, recipe.dtype, rngs=rngs)


_TASK = {'split_seed': 0, 'held_out': 0.0, 'shift': 0, 'label_smoothing': 0.0}
_IMAGENET = {'image_size': 224, 'classes': 1000, 'label_smoothing': 0.1}

_RESNET = Recipe(
    workload='resnet',
    steps=600,
    batch_size=64,
    optimizer=Optimizer('sgd', learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    schedule=Schedule(warmup=0.05, decay='cosine'),
    pruning=Pruning(distribution='erk'),
    model={'stages': (1, 1, 1), 'width': 16, 'bottleneck': False, 'large_stem': False},
    task=_TASK,
)
_VIT = Recipe(
    workload='vit',
    steps=800,
    batch_size=64,
    optimizer=Optimizer('adamw', learning_rate=2e-3, weight_decay=0.05, clip_norm=1.0),
    schedule=Schedule(warmup=0.1, decay='cosine'),
    pruning=Pruning(distribution='erk'),
    model={'patch': 2, 'width': 48, 'layers': 3, 'heads': 4, 'hidden': 96},
    task=_TASK,
)
# Dettmers and Zettlemoyer's sparse-learning, from memory and not compared with its code: a tenth of the training images
# is held out, Nesterov's momentum, a rate that falls to a tenth after 25,000 and 50,000 of 54,000 batches (100 epochs),
# L2 on every parameter, masks sparse from the beginning, changed once an epoch with a drop fraction that begins at 0.5
# and falls along a cosine. SET is defined on random graphs of Erdős and Rényi, in which narrow layers are denser.
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

RESNET = ImageWorkload(
    'resnet',
    {
        'default': _RESNET,
        'data': dataclasses.replace(
            _RESNET, preset='data', data='mnist', steps=4000, batch_size=128
        ),
        'full': dataclasses.replace(
            _RESNET,
            preset='full',
            data='imagenet',
            steps=112_590,  # 90 epochs of 1,281,167 images
            batch_size=1024,
            eval_every=0.01,
            dtype='bfloat16',
            optimizer=Optimizer(
                'sgd', learning_rate=0.4, momentum=0.9, nesterov=True, weight_decay=1e-4
            ),
            pruning=Pruning(distribution='erk', frequency=0.01),
            model={'stages': (3, 4, 6, 3), 'width': 64, 'bottleneck': True, 'large_stem': True},
            task=_IMAGENET,
        ),
    },
    _make_resnet,
)
VIT = ImageWorkload(
    'vit',
    {
        'default': _VIT,
        'data': dataclasses.replace(
            _VIT,
            preset='data',
            data='mnist',
            steps=4000,
            batch_size=128,
            model={**_VIT.model, 'patch': 4},
        ),
        'full': dataclasses.replace(
            _VIT,
            preset='full',
            data='imagenet',
            steps=112_590,
            batch_size=1024,
            eval_every=0.01,
            dtype='bfloat16',
            optimizer=Optimizer('adamw', learning_rate=1e-3, weight_decay=0.1, clip_norm=1.0),
            pruning=Pruning(distribution='erk', frequency=0.01),
            model={'patch': 16, 'width': 768, 'layers': 12, 'heads': 12, 'hidden': 3072},
            task=_IMAGENET,
        ),
    },
    _make_vit,
)
LENET = ImageWorkload(
    'lenet',
    {
        'data': _LENET,
        'default': dataclasses.replace(
            _LENET,
            preset='default',
            data='digits',
            steps=1000,
            pruning=Pruning(distribution='erk', drop_fraction=0.5),
        ),
    },
    _make_lenet,
)
