"""The model of the digits demo and its training: all seeds of one algorithm in one compiled program."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpruner
from digits_data import Dataset
from jaxpruner.baselines.convolutions import convolution_as_matmul

FILTERS = 16, 32
HIDDEN = 32
CLASSES = 10
CHUNKS = 40  # a run is cut into this many calls of the compiled program, between which the progress is shown
TIMED_EVERY = 3  # every third chunk is compared with a dense one of the same length
EVALUATION_BATCH = 500


class CNN(nnx.Module):
    """Two 3x3 convolutions of stride 2 and two dense layers."""

    def __init__(self, image_size: int, *, rngs: nnx.Rngs):
        side = math.ceil(image_size / 4)  # each convolution halves it, rounding up
        convolution = functools.partial(
            nnx.Conv, kernel_size=(3, 3), strides=2, conv_general_dilated=convolution_as_matmul, rngs=rngs
        )
        self.conv1 = convolution(1, FILTERS[0])
        self.conv2 = convolution(FILTERS[0], FILTERS[1])
        self.dense = nnx.Linear(side * side * FILTERS[1], HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        features = nnx.relu(self.conv2(nnx.relu(self.conv1(images))))
        return self.head(nnx.relu(self.dense(features.reshape(len(features), -1))))


class TrainState(NamedTuple):
    """What a training step carries; with several seeds every leaf has a leading axis of that length."""

    params: Any  # nnx.State of CNN
    opt_state: Any  # the optax state, with the masks in it
    key: jax.Array  # typed key of the seed


@dataclasses.dataclass(frozen=True)
class Training:
    """The settings that every algorithm shares."""

    steps: int
    seeds: int
    batch_size: int
    learning_rate: float
    over_seeds: Literal['map', 'vmap'] = 'map'

    def chunks(self) -> list[tuple[int, int]]:
        """Returns the (first, past the last) step of each chunk."""
        edges = np.linspace(0, self.steps, min(CHUNKS, self.steps) + 1).astype(int).tolist()
        return list(itertools.pairwise(edges))


class Program(NamedTuple):
    """One algorithm's compiled functions, over all seeds at once."""

    start: TrainState
    advance: Callable[[TrainState, int, int], TrainState]  # from a step up to another, not counting the latter
    forward_params: Callable[[TrainState], Any]  # the weights that the forward pass sees


class Outcome(NamedTuple):
    """What a finished training leaves."""

    params: Any  # nnx.State, the weights that the forward pass sees, seeds on the leading axis
    relative_time: float  # time per step over that of dense, the median of interleaved repeats


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The training of one seed with one algorithm, as pure functions of a `TrainState`."""

    config: dict[str, Any]  # of the updater
    training: Training
    image_size: int

    def updater(self, key: jax.Array) -> Any:
        """Returns the pruner. Its random masks come from the seed of the weights: the spread over seeds has both."""
        return jaxpruner.create_updater_from_config({**self.config, 'rng_seed': jax.random.fold_in(key, 1)})

    def optimizer(self, key: jax.Array) -> optax.GradientTransformation:
        """Returns Adam, wrapped by the pruner."""
        schedule = optax.cosine_decay_schedule(self.training.learning_rate, self.training.steps)
        return self.updater(key).wrap_optax(optax.adam(schedule))

    def initialize(self, key: jax.Array) -> TrainState:
        """Returns the state before the first step."""
        params = nnx.state(CNN(self.image_size, rngs=nnx.Rngs(key)), nnx.Param)
        opt_state = self.optimizer(key).init(params)
        # Methods that are sparse from the start have masks already: without this the first step would be dense.
        return TrainState(self.updater(key).post_gradient_update(params, opt_state), opt_state, key)

    def step(self, images: jax.Array, labels: jax.Array, index: jax.Array, state: TrainState) -> TrainState:
        """Trains on one batch, drawn at random."""
        draw_key = jax.random.fold_in(jax.random.fold_in(state.key, 2), index)
        batch = jax.random.randint(draw_key, (self.training.batch_size,), 0, len(images))

        def loss(params: Any) -> jax.Array:
            # Straight-through methods mask here; for all others this changes nothing.
            logits = apply_model(self.updater(state.key).pre_forward_update(params, state.opt_state), images[batch])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch]).mean()

        grads = jax.grad(loss)(state.params)
        updates, opt_state = self.optimizer(state.key).update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.key)

    def forward_params(self, state: TrainState) -> Any:
        """Returns the weights that the forward pass sees: those of a straight-through method are masked only there."""
        return self.updater(state.key).pre_forward_update(state.params, state.opt_state)


def build_program(config: dict[str, Any], dataset: Dataset, training: Training) -> Program:
    """Compiles the training of all seeds with one algorithm, given as the configuration of its updater."""
    algorithm = Algorithm(config, training, dataset.x_train.shape[1])
    data = jnp.asarray(dataset.x_train), jnp.asarray(dataset.y_train)

    def over_seeds(function: Callable[[TrainState], Any], states: TrainState) -> Any:
        return jax.vmap(function)(states) if training.over_seeds == 'vmap' else jax.lax.map(function, states)

    def advance(data: tuple[jax.Array, jax.Array], states: TrainState, first: int, stop: int) -> TrainState:
        step = functools.partial(algorithm.step, *data)
        return over_seeds(lambda state: jax.lax.fori_loop(first, stop, step, state), states)

    # Not under jit: the single operations are compiled once for all algorithms, which share most of them.
    starts = [algorithm.initialize(jax.random.key(seed)) for seed in range(training.seeds)]
    start = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    compiled = jax.jit(advance).lower(data, start, 0, training.steps).compile()
    forward_params = jax.jit(functools.partial(over_seeds, algorithm.forward_params))
    return Program(start, functools.partial(compiled, data), forward_params)


def train(program: Program, dense: Program, training: Training, on_chunk: Callable[[int], None]) -> Outcome:
    """Trains one algorithm and calls `on_chunk` with the steps done after each chunk.

    The machine's speed drifts while a demo runs, so chunks are timed against dense ones that run next to them.
    """
    jax.block_until_ready(program.advance(program.start, 0, 1))  # the first call of a program is slower
    states, ratios = program.start, []
    for number, (first, stop) in enumerate(training.chunks()):
        dense_call = functools.partial(_timed, dense.advance, dense.start, first, stop)
        is_timed, dense_first = number % TIMED_EVERY == 0, number % 2 == 0
        # Before and after in turn, since what runs second may find the machine in another state.
        dense_seconds = dense_call()[1] if is_timed and dense_first else None
        states, seconds = _timed(program.advance, states, first, stop)
        if is_timed:
            ratios.append(seconds / (dense_seconds or dense_call()[1]))
        on_chunk(stop)
    return Outcome(program.forward_params(states), statistics.median(ratios))


def test_accuracy(dataset: Dataset, params: Any) -> np.ndarray:
    """Returns the share of the test images that each seed's weights classify rightly, float[seeds]."""
    seeds = len(jax.tree.leaves(params)[0])
    correct = np.zeros(seeds)
    for at in range(0, len(dataset.x_test), EVALUATION_BATCH):
        images, labels = (part[at : at + EVALUATION_BATCH] for part in (dataset.x_test, dataset.y_test))
        correct += np.asarray(_predict(params, images) == labels).sum(axis=-1)
    return correct / len(dataset.x_test)


def apply_model(params: Any, images: jax.Array) -> jax.Array:
    """Returns the logits of a batch, float[batch, classes]."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: CNN(images.shape[1], rngs=nnx.Rngs(0))))
    return nnx.merge(graph, params)(images)


@jax.jit
def _predict(params: Any, images: jax.Array) -> jax.Array:
    """Returns the class of each image for each seed, int[seeds, images]."""
    return jax.lax.map(lambda one_seed: apply_model(one_seed, images).argmax(axis=-1), params)


def _timed(advance: Callable, *arguments: Any) -> tuple[TrainState, float]:
    """Returns the result of a compiled call, waited for, and its seconds."""
    began = time.perf_counter()
    result = jax.block_until_ready(advance(*arguments))
    return result, time.perf_counter() - began
