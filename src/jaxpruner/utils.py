"""Counting zeros in parameters, reading seeds, and calling functions with those arguments that they know."""

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib

_TOTAL_SPARSITY = '_total_sparsity'
_NPARAMS = '_nparams'
_NPARAMS_NNZ = '_nparams_nnz'
_TOTAL_INTERSECTION = '_total_intersection'
# Rows are counted in 32 bits, which a row below this length cannot exceed.
_MAX_ROW = 2**30
_BITS_IN_A_BYTE = 8
_DEFAULT_SEED = 8
# The keys that stand for a seed which was not given, as long as somebody holds them. Keys have no hash.
_default_keys: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_SEED_LIMIT = 2**63  # JAX takes no larger number for a seed


def summarize_sparsity(
    param_tree: tree_lib.PyTree,
    only_total_sparsity: bool = False,
    flops: Mapping[Any, float] | None = None,
) -> dict[str, Any]:
    """Counts the zeros of a pytree of parameters or masks.

    Args:
      param_tree: any pytree of arrays; `None`, random keys and numbers of Python are skipped.
      only_total_sparsity: leave the single leaves out.
      flops: leaf name or glob -> floating point operations (`UseGraph.leaf_flops`): adds those and the memory.

    Returns:
      `{'a/b/kernel': sparsity}` for each leaf, `'_total_sparsity'`, `'_nparams'` (number of parameters) and
      `'_nparams_nnz'` (those that are not zero). Counts are exact Python integers and shares Python floats; inside
      `jit` counts of non-zeros and shares are scalars. With `flops` also `'_flops'`, `'_flops_nnz'` (those with weights
      that are not zero), `'_nbytes'` and `'_nbytes_nnz'` (the weights that are not zero, and one bit for each weight
      that says which, where that is less).

    Raises:
      ValueError: a name in `flops` matches no leaf.

    >>> summarize_sparsity({'w': jnp.array([[0.0, 1.0], [0.0, 0.0]])})
    {'w': 0.75, '_total_sparsity': 0.75, '_nparams': 4, '_nparams_nnz': 1}
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(jax.tree.map(array_of_numbers, param_tree))
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    nonzeros = [count_nonzero(leaf) for leaf in leaves]
    summary: dict[str, Any] = {}
    if not only_total_sparsity:
        for path, size, nonzero in zip(paths, sizes, nonzeros, strict=True):
            summary[tree_lib.path_string(path)] = _ratio(size - nonzero, size)
    summary[_TOTAL_SPARSITY] = _ratio(sum(sizes) - sum(nonzeros), sum(sizes))
    summary[_NPARAMS] = sum(sizes)
    summary[_NPARAMS_NNZ] = sum(nonzeros)
    if flops is not None:
        rules, values = tree_lib.first_matches(flops, paths, 'flops'), list(flops.values())
        operations = [0 if rule is None else values[rule] for rule in rules]
        densities = [_ratio(nonzero, size) for nonzero, size in zip(nonzeros, sizes, strict=True)]
        summary['_flops'] = sum(operations)
        summary['_flops_nnz'] = sum(a * b for a, b in zip(operations, densities, strict=True))
        summary |= _memory(leaves, sizes, nonzeros)
    return summary


def array_of_numbers(leaf: Any) -> Any:
    """The leaf, or `None` where it has no zeros to count: random keys, numbers of Python.

    >>> array_of_numbers(jnp.ones(1)), array_of_numbers(3)
    (Array([1.], dtype=float32), None)
    """
    return (
        leaf
        if hasattr(leaf, 'dtype') and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else None
    )


def _memory(leaves: Sequence[Any], sizes: Sequence[int], nonzeros: Sequence[Any]) -> dict[str, Any]:
    dense, sparse = 0, 0
    for leaf, size, nonzero in zip(leaves, sizes, nonzeros, strict=True):
        dense += size * leaf.dtype.itemsize
        sparse += packed_bytes(size, nonzero, leaf.dtype.itemsize)
    return {'_nbytes': dense, '_nbytes_nnz': sparse}


def packed_bytes(weights: int, kept: Any, bytes_per_weight: int) -> Any:
    """What a leaf takes as one bit a weight and its kept weights, or dense where that is less.

    Args:
      weights: number of weights.
      kept: number of those that are kept, an integer or a traced scalar.
      bytes_per_weight: of a dense one.

    Returns:
      Bytes, a scalar array where `kept` is traced.

    >>> packed_bytes(100, 10, 4), packed_bytes(100, 100, 4)
    (53, 400)
    """
    dense = weights * bytes_per_weight
    packed = -(-weights // _BITS_IN_A_BYTE) + kept * bytes_per_weight
    return jnp.minimum(dense, packed) if tree_lib.is_traced(packed) else min(dense, packed)


def summarize_intersection(
    mask_tree1: tree_lib.PyTree, mask_tree2: tree_lib.PyTree, only_total_intersection: bool = False
) -> dict[str, Any]:
    """Which share of the first tree's non-zeros is non-zero in the second, too.

    Args:
      mask_tree1: any pytree of unpacked masks or parameters; `None` leaves are skipped.
      mask_tree2: a tree of the same structure; a leaf that is `None` in either is skipped.
      only_total_intersection: leave the single leaves out.

    Returns:
      `{'a/b/kernel': share}` for each leaf, and `'_total_intersection'` over all of them.

    Raises:
      ValueError: the trees or the shapes of their leaves differ.

    >>> summarize_intersection({'w': jnp.array([1, 1, 0])}, {'w': jnp.array([0, 1, 1])})
    {'w': 0.5, '_total_intersection': 0.5}
    """
    mask_tree1, mask_tree2 = tree_lib.as_arrays(mask_tree1), tree_lib.as_arrays(mask_tree2)
    paths, leaves, treedef = tree_lib.flatten_with_paths(mask_tree1)
    summary: dict[str, Any] = {}
    both_total: Any = 0
    first_total: Any = 0
    for path, first, second in zip(
        paths, leaves, tree_lib.leaves_like(treedef, mask_tree2), strict=True
    ):
        if second is None:
            continue
        if first.shape != second.shape:
            raise ValueError(
                f'{tree_lib.path_string(path)}: shapes differ, {first.shape} and {second.shape}'
            )
        both, ones = count_nonzero((first != 0) & (second != 0)), count_nonzero(first)
        if not only_total_intersection:
            summary[tree_lib.path_string(path)] = _ratio(both, ones)
        both_total, first_total = both_total + both, first_total + ones
    summary[_TOTAL_INTERSECTION] = _ratio(both_total, first_total)
    return summary


def count_nonzero(array: Any) -> Any:
    """Exact number of non-zeros, a scalar array inside `jit`; NaN counts as one.

    >>> count_nonzero(jnp.array([0.0, jnp.nan, 2.0]))
    2
    """
    if math.prod(array.shape) < _MAX_ROW:
        count = jnp.count_nonzero(array)
        return count if tree_lib.is_traced(count) else int(count)
    return sum(count_nonzero(array[i]) for i in range(array.shape[0]))


def _ratio(part: Any, whole: Any) -> Any:
    """The quotient, 0 of nothing."""
    if isinstance(whole, int):
        return part / whole if whole else 0.0
    return part / jnp.maximum(whole, 1)


def check_callable(name: str, value: Any) -> None:
    """Refuses a setting that is neither a function nor `None`.

    Args:
      name: the setting's, for the message.
      value: what it was given.

    Raises:
      TypeError: it cannot be called.

    >>> check_callable('topk_fn', None)
    """
    if value is not None and not callable(value):
        raise TypeError(f'{name} must be a function, got {value!r}')


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
        if settings is None:  # a dataclass asks its class for the default
            return None
        seed = vars(settings).get(self._name)
        if seed is not None:
            return seed
        key = jax.random.key(_DEFAULT_SEED)
        _default_keys[id(key)] = key
        return key

    def __set__(self, settings: Any, seed: Any) -> None:
        # `dataclasses.replace` reads all fields and gives them to a new object: a default is still not given then.
        is_default = seed is not None and _default_keys.get(id(seed)) is seed
        vars(settings)[self._name] = None if is_default else seed


def check_seed(seed: Any) -> None:
    """Refuses what is no seed, without making a key (which would start JAX's backend).

    Args:
      seed: a whole number (also a traced integer scalar), a uint32 key, a typed key, or `None` for the default.

    Raises:
      TypeError: it is none of these.
      ValueError: the number is negative, or has more than 63 bits.

    >>> check_seed(8)
    """
    if seed is None:
        return
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        if not 0 <= seed < _SEED_LIMIT:
            raise ValueError(
                f'rng_seed must be a whole number from 0 to {_SEED_LIMIT - 1}, got {seed}'
            )
        return
    if isinstance(seed, jax.Array | np.ndarray):
        is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        if seed.ndim == 0 and (is_key or jnp.issubdtype(seed.dtype, jnp.integer)):
            return
        if seed.dtype == jnp.uint32 and seed.shape in ((2,), (4,)):
            return
    raise TypeError(f'rng_seed must be a whole number, a uint32 key or a typed key, got {seed!r}')


def prng_key(seed: Any, step: Any = None) -> jax.Array:
    """The random key that a seed setting means.

    Args:
      seed: a whole number (also a traced integer scalar), a uint32 key, a typed key, or `None` for the default, 8.
      step: int32 scalar to fold in; `None` for none.

    Returns:
      A key that `jax.random` takes.

    Raises:
      TypeError: it is none of these.

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


def given_state(state: Any, other: Any) -> Any:
    """The state that a method was given under one of its two names, `opt_state` and `sparse_state`.

    Args:
      state: what came under the one.
      other: what came under the other.

    Raises:
      TypeError: none or both were given.

    >>> given_state(None, 'state')
    'state'
    """
    if (state is None) == (other is None):
        raise TypeError('give the optimizer state once, as opt_state or as sparse_state')
    return other if state is None else state


def known_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes by name.

    Args:
      function: any function.
      arguments: by name.

    >>> known_arguments(lambda a, b: None, {'b': 1, 'c': 2})
    {'b': 1}
    """
    if not arguments:
        return {}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL
    }
    return {name: value for name, value in arguments.items() if name in names}


def check_taken(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Refuses arguments that a function does not take by name: they would have no effect.

    Args:
      function: any function.
      arguments: by name.
      name: what the function is called, for the message.

    Raises:
      TypeError: it does not take one of them.

    >>> check_taken(lambda a, b: None, {'b': 1}, 'add')
    """
    unused = sorted(set(arguments) - set(known_arguments(function, arguments)))
    if unused:
        raise TypeError(
            f'{name} does not take {", ".join(unused)}, which would have no effect; leave it out. To prune with a '
            'model and data, call jaxpruner.prune(params, sparsity, algorithm, apply_fn=…, batches=…)'
        )
