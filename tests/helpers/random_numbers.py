"""Random numbers that do not depend on which tests ran before."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

_TESTS = str(Path(__file__).resolve().parents[1])


class Normal:
    """Draws normal numbers in float32: `normal(3, 4)` has shape [3, 4]."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, *shape):
        return jnp.asarray(self.generator.normal(size=shape), jnp.float32)


def restart_generators():
    """Lets every generator that a module of tests holds begin anew, with other numbers than the module drew first."""
    for module in list(sys.modules.values()):
        if str(getattr(module, '__file__', '')).startswith(_TESTS):
            for value in vars(module).values():
                generator = value.generator if isinstance(value, Normal) else value
                if isinstance(generator, np.random.Generator):
                    _restart(generator.bit_generator)


def _restart(bits):
    seed = np.random.SeedSequence(bits.seed_seq.entropy, spawn_key=(1,))
    bits.state = type(bits)(seed).state
