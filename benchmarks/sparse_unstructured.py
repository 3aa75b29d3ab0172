"""Training steps on single kept weights against dense ones.

Adam, donated buffers. Both sides run under settings of the allocator that keep memory from step to step.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from benchmarks.models import Mlp, Params, mean_cross_entropy
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
    'weights and moments, share of bytes',
    'with positions',
    'share of weights',
)
_TX = optax.adam(1e-3)
_NEVER = sparsity_schedules.PeriodicSchedule(update_freq=1, update_start_step=10**9)
_ALWAYS = sparsity_schedules.PeriodicSchedule(update_freq=1)
MOVED_EVERY = 100  # steps
# Hidden layers, their width, and how many times as fast a step at 95 % has to be.
_MLPS = {'small': ((1, 32, None),), 'cpu': ((3, 1024, 1.3), (2, 4096, 1.3))}
SPARSITIES = (0.9, 0.95, 0.98)


def run(size: str, rounds: int) -> list[Row]:
    """Times the steps."""
    if jax.default_backend() != 'cpu':
        return []  # the kernel is for CPUs
    rows = []
    for layers, width, at_least in _MLPS[size]:
        model = Mlp((784, *[width] * layers, 10), 4 if size == 'small' else 128)
        name = f'MLP {layers} x {width}'
        for sparsity in SPARSITIES:
            row = _in_csr(model, sparsity, rounds)
            row['at least'] = at_least if sparsity == 0.95 else None
            rows.append(_row(f'{name}, {sparsity:.0%} in CSR, to dense', row))
        rows.append(
            _row(f'{name}, 95% in CSR, RigL every {MOVED_EVERY}, to static', _rigl(model, rounds))
        )
    return rows


def _row(name: str, columns: Mapping[str, Value]) -> Row:
    return Row(name, tuple(map(columns.get, COLUMNS)))


@dataclasses.dataclass
class _Run:
    """A training run: each call takes one step, whose buffers are donated to the next."""

    step: Callable[..., Any]
    carried: Any
    batch: Any

    def __post_init__(self):
        # The arrays of one run may not be donated to another's.
        self.carried = jax.tree.map(lambda leaf: leaf.copy(), self.carried)
        self.step = jax.jit(self.step, donate_argnums=0)

    def __call__(self) -> Any:
        self.carried = self.step(self.carried, self.batch)
        return self.carried


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _dense_run(model: Mlp) -> _Run:
    def step(carried: Any, batch: Any) -> Any:
        params, state = carried
        updates, state = _TX.update(jax.grad(model.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.jit(model.init)()
    return _Run(step, (params, _TX.init(params)), model.batch())


def _csr_model(model: Mlp, sparsity: float, **settings: Any) -> sparse.CompactModel:
    params = jax.eval_shape(model.init)
    return sparse.unstructured_sparse(
        model.logits, params, model.batch().inputs, sparsity=sparsity, **settings
    )


def _csr_run(model: Mlp, in_csr: sparse.CompactModel) -> _Run:
    def loss(weights: Params, topology: Any, probe: Any, batch: Any) -> jax.Array:
        logits = in_csr.apply(weights, topology, batch.inputs, probe=probe)
        return mean_cross_entropy(logits, batch.labels)

    def step(carried: Any, batch: Any) -> Any:
        weights, topology, state = carried

        def probe_grads(weights: Params, topology: Any) -> Any:
            return jax.grad(loss, argnums=2)(weights, topology, in_csr.probe(), batch)

        grads = jax.grad(loss)(weights, topology, None, batch)
        updates, state = _TX.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        # The schedule says no at the first step, and yes if it says so at each.
        return in_csr.update(weights, topology, state, tx=_TX, step=1, probe_grads=probe_grads)

    weights, topology = in_csr.pack(jax.jit(model.init)())
    return _Run(step, (weights, topology, _TX.init(weights)), model.batch())


def _in_csr(model: Mlp, sparsity: float, rounds: int) -> dict[str, Value]:
    in_csr = _csr_model(model, sparsity)
    dense, sparse_run = _dense_run(model), _csr_run(model, in_csr)
    dense_bytes = _bytes(dense.carried)
    weights, topology, state = sparse_run.carried
    trained = _bytes((weights, state))
    with_positions = trained + _bytes(topology)
    times = interleaved({'dense': dense, 'sparse': sparse_run}, rounds, SECONDS)
    return {
        'times as fast': ratio(times['dense'], times['sparse']),
        'milliseconds': times['sparse'].milliseconds,
        'weights and moments, share of bytes': trained / dense_bytes,
        'with positions': with_positions / dense_bytes,
        'share of weights': in_csr.plan.kept / in_csr.plan.size,
    }


def _rigl(model: Mlp, rounds: int) -> dict[str, Value]:
    """The rate of static masks, to that of RigL, whose mask updates are counted at one step of many."""
    static = _csr_run(model, _csr_model(model, 0.95))
    moving = _csr_model(model, 0.95, algorithm='rigl', scheduler=_ALWAYS)
    times = interleaved({'static': static, 'rigl': _csr_run(model, moving)}, rounds, SECONDS)
    pairs = zip(times['static'].rounds, times['rigl'].rounds, strict=True)
    rounds_of_both = [((MOVED_EVERY - 1) * without + due) / MOVED_EVERY for without, due in pairs]
    on_average = times['static']._replace(rounds=rounds_of_both)
    return {
        'times as fast': ratio(times['static'], on_average),
        'milliseconds': times['rigl'].milliseconds,
    }
