"""What counts as a seed, and the random key that it means."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib

_DEFAULT_SEED = 8
_SEED_LIMIT = 2**63  # JAX takes no larger number for a seed


class SeedField:
    """A dataclass field for a seed: where none was given, it reads as the default key.

    The key is made when it is read, since making it starts JAX's backend.

    >>> class Settings:
    ...     rng_seed = SeedField()
    >>> settings = Settings()
    >>> settings.rng_seed == jax.random.key(8)
    Array(True, dtype=bool)
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, settings: Any, owner: type | None = None) -> Any:
        seed = None if settings is None else vars(settings).get(self._name)
        if settings is None or seed is not None:  # a dataclass asks its class for the default
            return seed
        return jax.random.key(_DEFAULT_SEED)

    def __set__(self, settings: Any, seed: Any) -> None:
        vars(settings)[self._name] = seed


def check_seed(seed: Any) -> None:
    """Refuses what is no seed, without making a key (which would start JAX's backend).

    A seed is a whole number (also a traced integer scalar) of at most 63 bits, a uint32 key, a typed key, or `None` for
    the default.
    """
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        if not 0 <= seed < _SEED_LIMIT:
            raise ValueError(
                f'rng_seed must be a whole number from 0 to {_SEED_LIMIT - 1}, got {seed}'
            )
        return
    dtype: Any = getattr(seed, 'dtype', None)
    shape = getattr(seed, 'shape', None)
    is_scalar = shape == () and any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jax.dtypes.prng_key)
    )
    if seed is not None and not is_scalar and not (dtype == jnp.uint32 and shape in ((2,), (4,))):
        raise TypeError(
            f'rng_seed must be a whole number, a uint32 key or a typed key, got {seed!r}'
        )


def prng_key(seed: Any, step: Any = None) -> jax.Array:
    """Makes the random key that a seed means (see `check_seed`), with a step folded in if there is one.

    >>> prng_key(8)
    Array([0, 8], dtype=uint32)
    """
    check_seed(seed)
    seed = _DEFAULT_SEED if seed is None else seed
    if not isinstance(seed, jax.Array | np.ndarray):
        key = jax.random.PRNGKey(int(seed))
    elif seed.ndim == 0 and not jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        key = jax.random.PRNGKey(jnp.asarray(seed))
    else:
        key = jnp.asarray(seed)
    return key if step is None else jax.random.fold_in(key, step)


def split_key(key: jax.Array, number: int) -> list[jax.Array]:
    """Splits a key as `jax.random.split` does, into a list.

    Keys with known values are read together: cutting an array into single keys would be a program for each number.

    >>> [key.shape for key in split_key(prng_key(8), 2)]
    [(), ()]
    """
    if not number:
        return []
    keys = jax.random.split(key, number)
    if tree_lib.is_traced(keys):
        return list(keys)
    impl, rows = jax.random.key_impl(keys), np.asarray(jax.random.key_data(keys))
    return [jax.random.wrap_key_data(row, impl=impl) for row in rows]
