"""Pruned models as `sparse.compile` runs them, against the same models dense: inference at one batch.

Both sides keep their memory between calls (see `step.KEEP_MEMORY`); the column `by default` has the ratio with the
allocator as it is, measured in another process.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from benchmarks import step
from benchmarks.models import Mlp, Params, Transformer
from benchmarks.report import Row
from benchmarks.resnet import Resnet
from benchmarks.timing import Ratio, interleaved, ratio
from jaxpruner import channel_groups, sparse, sparsity_types

ROUNDS = 25
SECONDS = 10
COLUMNS = (
    'times as fast',
    'at least',
    'by default',
    'milliseconds',
    'share of bytes',
    'products that are not dense',
    'of',
    'channels removed',
)
NEVER_SLOWER = 0.97
# If this is set, the allocator stays as it is.
_PLAIN_ALLOCATOR = 'BENCHMARKS_PLAIN_ALLOCATOR'

Apply = Callable[..., Any]


class Case(NamedTuple):
    """A model, how it is pruned, and how many times as fast as dense it has to be.

    Attributes:
      make: nothing -> apply function, parameters, a batch.
      prune: apply function, parameters, batch -> parameters.
      at_least: the limit of the ratio.
    """

    make: Callable[[], tuple[Apply, Params, Any]]
    prune: Callable[[Apply, Params, Any], Params]
    at_least: float = NEVER_SLOWER


def environment() -> Mapping[str, str]:
    """What a process needs to keep its memory and to have Keras on JAX, if this one has it not."""
    if _PLAIN_ALLOCATOR in os.environ:
        return {}
    needed = {**step.environment(), 'KERAS_BACKEND': 'jax'}
    return {} if needed.items() <= os.environ.items() else needed


def run(size: str, rounds: int) -> Iterator[Row]:
    """Times each model; here, and in a process with the allocator as it is."""
    cases = _cases(size)
    plain = {}
    if _PLAIN_ALLOCATOR not in os.environ:
        plain = _with_plain_allocator(size, rounds)
    for name, case in cases.items():
        yield _row(name, case, rounds, plain.get(name))


def _row(name: str, case: Case, rounds: int, plain: Ratio | None) -> Row:
    apply_fn, params, batch = case.make()
    params = case.prune(apply_fn, params, batch)
    apply, packed, report = sparse.compile(apply_fn, params, batch, progress=False)
    dense = jax.jit(apply_fn)
    _check(apply(packed, batch), dense(params, batch))
    calls = {'dense': lambda: dense(params, batch), 'compiled': lambda: apply(packed, batch)}
    times = interleaved(calls, rounds, SECONDS)
    formats = [layer.format for layer in report.layers.values()]
    values = {
        'times as fast': ratio(times['dense'], times['compiled']),
        'at least': case.at_least,
        'by default': plain,
        'milliseconds': times['compiled'].milliseconds,
        'share of bytes': _bytes(packed) / _bytes(params),
        'products that are not dense': len(formats) - formats.count('dense'),
        'of': len(formats),
        'channels removed': sum(report.channels.values()),
    }
    return Row(name, tuple(values[column] for column in COLUMNS))


def _with_plain_allocator(size: str, rounds: int) -> dict[str, Ratio]:
    """The ratios in a process without the allocator's settings."""
    command = [sys.executable, '-m', 'benchmarks', 'sparse_execution', '--json']
    command += ['--size', size, '--rounds', str(rounds)]
    variables = {key: text for key, text in os.environ.items() if key not in step.KEEP_MEMORY}
    variables |= {_PLAIN_ALLOCATOR: '1', 'KERAS_BACKEND': 'jax'}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])['rows']
    return {row['name']: Ratio(**row['times as fast']) for row in rows}


def _check(results: Any, expected: Any) -> None:
    for mine, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(other).max()) + 1e-6
        error = float(jnp.abs(mine - other).max()) / scale
        if not error < 1e-3:
            raise AssertionError(f'a compiled model differs from the dense one by {error:.2g}')


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class _Sizes(NamedTuple):
    """The models of a size."""

    mlp: Mlp
    transformer: Transformer
    resnet: Resnet
    block: tuple[int, int]  # of the block-masked transformer
    image: int  # side of Keras's images
    keras: tuple[str, ...] = ('MobileNetV2', 'ResNet50', 'EfficientNetB0')
    sparsities: tuple[float, ...] = (0.5, 0.8, 0.95)  # of the transformer; none: it is left out


_SIZES = {
    'small': _Sizes(
        Mlp((16, 64, 8), batch_size=4),
        Transformer(1, 64, 2, 32, batch_size=2, sequence=8),
        Resnet((4, 8), 1, image=8, batch_size=2),
        block=(8, 32),
        image=32,
        keras=(),
        sparsities=(),
    ),
    'cpu': _Sizes(
        Mlp((784, 1024, 1024, 1024, 10), batch_size=128),
        Transformer(4, 512, 8, 256, batch_size=8, sequence=64),
        Resnet((64, 128, 256), 2, image=32, batch_size=16),
        block=(8, 128),
        image=96,
    ),
    'gpu': _Sizes(
        Mlp((784, 4096, 4096, 4096, 10), batch_size=2048),
        Transformer(12, 768, 12, 32768, batch_size=8, sequence=512),
        Resnet((64, 128, 256), 2, image=32, batch_size=256),
        block=(64, 128),
        image=224,
    ),
}


def _cases(size: str) -> dict[str, Case]:
    sizes = _SIZES[size]
    transformer, mlp = sizes.transformer, sizes.mlp
    scanned = dataclasses.replace(transformer, scanned=True)
    rows: dict[str, Case] = {}
    for sparsity in sizes.sparsities:
        rows[f'transformer, {sparsity:.0%}'] = Case(_made(transformer), _unstructured(sparsity))
    blocks = sparsity_types.Block(sizes.block)
    if sizes.sparsities:
        rows['transformer, blocks, 90%'] = Case(_made(transformer), _unstructured(0.9, blocks), 1.3)
        rows['scanned transformer, 90%'] = Case(_made(scanned), _unstructured(0.9))
    rows['MLP, 98%'] = Case(_made(mlp), _unstructured(0.98), 1.5)
    rows['ResNet, half of the channels'] = Case(_made(sizes.resnet), _half_of_the_channels, 1.8)
    for name in sizes.keras:
        made = _keras(name, sizes.image)
        rows[f'Keras {name}, 90%'] = Case(made, _random_masks(0.9))
    return rows


def _made(model: Any) -> Callable[[], tuple[Apply, Params, Any]]:
    return lambda: (model.logits, jax.jit(model.init)(), model.batch().inputs)


def _unstructured(sparsity: float, sparsity_type: Any = 'unstructured') -> Callable[..., Params]:
    """The smallest weights of each matrix are zero."""

    def prune(apply_fn: Apply, params: Params, batch: Any) -> Params:
        settings = {'sparsity_type': sparsity_type, 'progress': False}
        return jaxpruner.prune(params, sparsity, apply_fn=apply_fn, batches=[batch], **settings)[0]

    return prune


def _random_masks(sparsity: float) -> Callable[..., Params]:
    """Random masks for all leaves but vectors; drawn with NumPy, which compiles no program for each shape."""

    def prune(apply_fn: Apply, params: Params, batch: Any) -> Params:
        rng = np.random.default_rng(0)
        pruned = dict(params)
        for name, leaf in params.items():
            if leaf.ndim > 1:
                is_kept = rng.random(leaf.shape, np.float32) >= sparsity
                pruned[name] = jnp.asarray(np.where(is_kept, leaf, 0))
        return pruned

    return prune


def _half_of_the_channels(apply_fn: Apply, params: Params, batch: Any) -> Params:
    """Half of each group of channels is zero, as pruning by channels leaves it."""
    graph = channel_groups(apply_fn, params, batch)
    counts = {name: group.size // 2 for name, group in graph.groups.items()}
    choice = graph.choose(params, counts=counts)
    return graph.zeroed(params, choice.keep)


def _keras(name: str, image: int) -> Callable[[], tuple[Apply, Params, Any]]:
    """A model of keras.applications with random weights, on JAX."""

    def make() -> tuple[Apply, Params, Any]:
        os.environ.setdefault('KERAS_BACKEND', 'jax')
        import keras

        keras.utils.set_random_seed(0)
        application = getattr(keras.applications, name)
        model = application(weights=None, input_shape=(image, image, 3), classes=10)
        frozen = [variable.value for variable in model.non_trainable_variables]

        paths = [variable.path for variable in model.trainable_variables]

        def apply_fn(params: Params, images: jax.Array) -> jax.Array:
            trained = [params[path] for path in paths]
            return model.stateless_call(trained, frozen, images)[0]

        params = {variable.path: variable.value for variable in model.trainable_variables}
        random = np.random.default_rng(0)
        images = random.normal(size=(8, image, image, 3))
        return apply_fn, params, jnp.asarray(images, jnp.float32)

    return make
