"""Measures one thing in a process that has compiled nothing: `python -m benchmarks.cold SIZE NAME` prints seconds.

Only the libraries are imported, and the parameters and a batch are made. The persistent compilation cache is off, or in
a FOLDER that stands behind NAME.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax

import jaxpruner
from benchmarks.models import BareTransformer, Model, Transformer
from benchmarks.selection import SPARSITY
from benchmarks.timing import Lap, Stopwatch
from benchmarks.training import Method, compiled_step
from jaxpruner import sparsity_schedules

_scheduler = sparsity_schedules.PolynomialSchedule(
    update_freq=10, update_start_step=0, update_end_step=1000
)
_settings = {'scheduler': _scheduler, 'sparsity': SPARSITY}
_MAGNITUDE = jaxpruner.MagnitudePruning(**_settings)
DENSE = 'dense'
METHODS = {
    DENSE: Method(None),
    'magnitude': Method(_MAGNITUDE),
    'global magnitude': Method(jaxpruner.GlobalMagnitudePruning(**_settings)),
    'RigL': Method(jaxpruner.RigL(**_settings)),
    'SET': Method(jaxpruner.SET(**_settings)),
    'straight-through magnitude': Method(jaxpruner.SteMagnitudePruning(**_settings)),
    'magnitude, 2:4': Method(
        jaxpruner.MagnitudePruning(_scheduler, sparsity_type='2:4', sparsity=0.5)
    ),
}


@dataclasses.dataclass(frozen=True)
class FirstStep:
    """What passes before the first training step: `init`, tracing and lowering, compiling; Adam, donated buffers."""

    model: Model
    method: Method

    def measure(self) -> dict[str, Lap]:
        """What each part takes."""
        params = jax.block_until_ready(jax.jit(self.model.init)())
        batch = jax.block_until_ready(self.model.batch())
        watch = Stopwatch()
        state = self.method.optimizer().init(params)
        jax.block_until_ready(state)
        init = watch.lap()
        lowered = compiled_step(self.model, self.method).lower(params, state, batch)
        lower = watch.lap()
        lowered.compile()
        return {'init': init, 'lower': lower, 'compile': watch.lap()}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that compiles what it needs, and the same once more."""

    model: Model
    function: Callable[[Model, Any], Any]

    def measure(self) -> dict[str, Lap]:
        """What both take."""
        params = jax.block_until_ready(jax.jit(self.model.init)())
        jax.block_until_ready(self.model.batch())
        watch = Stopwatch()
        jax.block_until_ready(self.function(self.model, params))
        cold = watch.lap()
        jax.block_until_ready(self.function(self.model, params))
        return {'cold': cold, 'warm': watch.lap()}


Case = FirstStep | Call


def sparsified(model: Model, params: Any) -> Any:
    """The parameters, pruned by magnitude at once."""
    return _MAGNITUDE.instant_sparsify(params)


_bare = functools.partial(BareTransformer, width=256, heads=4, batch_size=4, sequence=64)
# 214 arrays.
MANY_LEAVES = Transformer(13, 256, heads=4, vocabulary=1024, batch_size=4, sequence=64)
SMALL = BareTransformer(1, 16, heads=2, batch_size=2, sequence=8)


def _first_steps(title: str, model: Model, methods: Iterable[str]) -> dict[str, Case]:
    return {f'{title}: {name}': FirstStep(model, METHODS[name]) for name in methods}


_ON_DEVICES: dict[str, Case] = {
    **_first_steps('6 layers, 24 kernels', _bare(6), METHODS),
    **_first_steps('24 layers, 96 kernels', _bare(24), METHODS),
    **_first_steps('13 blocks, 214 arrays', MANY_LEAVES, (DENSE, 'magnitude')),
    'instant_sparsify, 96 kernels of 4 shapes': Call(_bare(24), sparsified),
}
CASES: dict[str, dict[str, Case]] = {
    'small': {
        **_first_steps('1 layer, 4 kernels', SMALL, (DENSE,)),
        'instant_sparsify, 4 kernels of 4 shapes': Call(SMALL, sparsified),
    },
    'cpu': _ON_DEVICES,
    'gpu': _ON_DEVICES,
}

if __name__ == '__main__':
    size, name, *folders = sys.argv[1:]
    jax.config.update('jax_enable_compilation_cache', bool(folders))
    for folder in folders:
        jax.config.update('jax_compilation_cache_dir', folder)
    print(json.dumps(CASES[size][name].measure()))
