"""Training steps on blocks, against dense ones: what blocks save of time and of memory.

Both sides run under settings of the allocator that keep memory from step to step. The first rows are models at 90 %,
the next ones what the moving of blocks costs, and then the cost over the sparsity and over the width.
`examples/sparse_training_picture.py` draws those.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from benchmarks.models import Batch, Mlp, Params, Transformer, mean_cross_entropy
from benchmarks.report import Row, Value
from benchmarks.step import environment as environment
from benchmarks.timing import interleaved, ratio
from jaxpruner import sparse, sparsity_schedules

ROUNDS = 15
SECONDS = 12
COLUMNS = (
    'times as fast',
    'at least',
    'milliseconds',
    'share of memory',
    'share of weights',
    'memory to weights',
)
SPARSITY = 0.9
BLOCK = (8, 128)
RANK = 8
MOVED_EVERY = 100  # steps
_TX = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is trained in blocks, and how many times as fast a step has to be."""

    model: Any
    settings: Mapping[str, Any]
    at_least: float | None = None

    def block_model(self, **settings: Any) -> sparse.CompactModel:
        """The model in blocks."""
        params = jax.eval_shape(self.model.init)
        with warnings.catch_warnings():
            # Here it does not matter which inputs are read; how many weights are kept is a column.
            warnings.filterwarnings('ignore', message='block_sparse: blocks')
            return sparse.block_sparse(
                self.model.logits,
                params,
                self.model.batch().inputs,
                **{**self.settings, **settings},
            )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured at a size of the benchmark."""

    mlps: Mapping[int, tuple[int, float]]  # width -> hidden layers, times as fast
    transformer: Transformer
    block: tuple[int, int]
    rank: int
    swept_width: int
    sparsities: tuple[float, ...]
    widths: tuple[int, ...]
    batch_size: int

    def mlp(self, width: int, hidden_layers: int = 3) -> Mlp:
        """A classifier of images."""
        return Mlp((784, *[width] * hidden_layers, 10), self.batch_size)

    def cases(self) -> Iterator[tuple[str, Case]]:
        """The models at one sparsity."""
        wide = {'sparsity': SPARSITY, 'block': self.block}
        for width, (layers, at_least) in self.mlps.items():
            mlp = self.mlp(width, layers)
            yield f'MLP {layers} x {width}', Case(mlp, wide, at_least)
            yield (
                f'MLP {layers} x {width}, rank {self.rank}',
                Case(mlp, {**wide, 'low_rank': self.rank}),
            )
        transformer, name = self.transformer, _name_of(self.transformer)
        yield name, Case(transformer, wide, 1.4)

    def sweep(self) -> Iterator[tuple[str, Case]]:
        """One model over sparsities, and one sparsity over widths."""
        for sparsity in self.sparsities:
            settings = {'sparsity': sparsity, 'block': self.block}
            yield f'sparsity {sparsity}', Case(self.mlp(self.swept_width), settings)
        for width in self.widths:
            settings = {'sparsity': SPARSITY, 'block': self.block}
            yield f'width {width}', Case(self.mlp(width), settings)


def _name_of(model: Transformer) -> str:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init)))
    return f'transformer of {parameters / 1e6:.1f} million, width {model.width}'


_CPU = Sizes(
    {1024: (3, 3.0), 2048: (3, 4.0), 4096: (2, 4.5)},
    Transformer(8, 256, heads=4, vocabulary=1024, batch_size=8, sequence=64),
    block=BLOCK,
    rank=RANK,
    swept_width=1024,
    sparsities=(0.5, 0.75, 0.9, 0.95, 0.98),
    widths=(256, 512, 1024, 2048, 4096),
    batch_size=128,
)
SIZES = {
    'small': dataclasses.replace(
        _CPU,
        mlps={32: (1, 3.0)},
        transformer=Transformer(1, 16, heads=2, vocabulary=32, batch_size=2, sequence=8),
        block=(4, 8),
        rank=1,
        swept_width=16,
        sparsities=(0.5,),
        widths=(32,),
        batch_size=4,
    ),
    'cpu': _CPU,
    'gpu': dataclasses.replace(_CPU, batch_size=4096),
}


def run(size: str, rounds: int) -> Iterator[Row]:
    """Times the steps."""
    sizes = SIZES[size]
    for name, case in sizes.cases():
        yield _row(name, _measured(case, rounds))
    mlp = Case(sizes.mlp(sizes.swept_width), {'sparsity': SPARSITY, 'block': sizes.block})
    yield _row_of_moving(mlp, rounds)
    for name, case in sizes.sweep():
        yield _row(name, _measured(case, rounds))


def _row(name: str, columns: Mapping[str, Value]) -> Row:
    return Row(name, tuple(map(columns.get, COLUMNS)))


class _Steps:
    """A training run: each call takes one step, whose buffers are donated to the next.

    Attributes:
      bytes: of weights, positions and moments.
    """

    def __init__(self, step: Callable[..., Any], weights: Params, topology: Any, batch: Batch):
        carried = weights, topology, _TX.init(weights)
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(carried))
        self._step = jax.jit(step, donate_argnums=(0, 1, 2))
        # The arrays of one run may not be donated to another's.
        self._carried = jax.tree.map(lambda leaf: leaf.copy(), carried)
        self._batch, self._number = batch, 0

    def __call__(self) -> Any:
        self._number += 1
        self._carried = self._step(*self._carried, self._batch, self._number)
        return self._carried


def _measured(case: Case, rounds: int) -> dict[str, Value]:
    model, block_model = case.model, case.block_model()
    params, batch = jax.jit(model.init)(), model.batch()
    dense = _Steps(_dense_step(model), params, {}, batch)
    in_blocks = _Steps(_block_step(block_model), *block_model.pack(params), batch)
    times = interleaved({'dense': dense, 'blocks': in_blocks}, rounds, SECONDS)
    memory = in_blocks.bytes / dense.bytes
    weights = block_model.plan.kept / block_model.plan.size
    return {
        'times as fast': ratio(times['dense'], times['blocks']),
        'at least': case.at_least,
        'milliseconds': times['blocks'].milliseconds,
        'share of memory': memory,
        'share of weights': weights,
        'memory to weights': memory / weights,
    }


def _row_of_moving(case: Case, rounds: int) -> Row:
    """The rate of static blocks, to that of RigL: blocks that move in each step, counted at one step of many."""
    params, batch = jax.jit(case.model.init)(), case.model.batch()
    steps = {}
    for algorithm in ('static_sparse', 'rigl'):
        model = case.block_model(
            algorithm=algorithm, scheduler=sparsity_schedules.PeriodicSchedule(1)
        )
        steps[algorithm] = _Steps(_block_step(model), *model.pack(params), batch)
    times = interleaved(steps, rounds, SECONDS)
    static, rigl = times['static_sparse'], times['rigl']
    on_average = static._replace(
        rounds=[
            ((MOVED_EVERY - 1) * one + other) / MOVED_EVERY
            for one, other in zip(static.rounds, rigl.rounds, strict=True)
        ]
    )
    columns = {
        'times as fast': ratio(static, on_average),
        'milliseconds': rigl.milliseconds,
    }
    return _row(f'RigL, blocks move every {MOVED_EVERY} steps, to static blocks', columns)


def _dense_step(model: Any) -> Callable[..., Any]:
    def step(params: Params, topology: Any, state: Any, batch: Batch, number: Any) -> Any:
        del number
        gradients = jax.grad(model.loss)(params, batch)
        updates, state = _TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), topology, state

    return step


def _block_step(model: sparse.CompactModel) -> Callable[..., Any]:
    def loss(weights: Params, topology: Any, probe: Any, batch: Batch) -> jax.Array:
        logits = model.apply(weights, topology, batch.inputs, probe=probe)
        return mean_cross_entropy(logits, batch.labels)

    def step(weights: Params, topology: Any, state: Any, batch: Batch, number: Any) -> Any:
        def probe_grads(weights: Params, topology: Any) -> Any:
            return jax.grad(loss, argnums=2)(weights, topology, model.probe(), batch)

        gradients = jax.grad(loss)(weights, topology, None, batch)
        updates, state = _TX.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        return model.update(weights, topology, state, tx=_TX, step=number, probe_grads=probe_grads)

    return step
