"""How sparse the activations of a model are when it runs."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching

from jaxpruner import tree as tree_lib
from jaxpruner.activations import calls, layer_pruning, models
from jaxpruner.activations import layers as layers_lib


def summarize_activations(
    apply_fn_or_module: Any,
    *args: Any,
    where: Any = '*',
    count: str = 'outputs',
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Runs a model forward once and counts the zeros that its layers return or are given.

    A sparsified model shows what is left after pruning; where it prunes inputs, count them. A layer that is called
    several times, in a scan, too, counts all calls; one that contains others counts besides them. flax 0.12.12 refuses
    callbacks, and so these counts, in `nn.scan` (a data dependency on the scan body) unless it is given
    `check_constancy_invariants=False`.

    Args:
      apply_fn_or_module: as for `sparsify_activations`.
      *args: what the model is given: for linen and Haiku the arguments of `apply`, for a function, nnx and Equinox
        those of the model itself.
      where: the layers, as for `sparsify_activations`; functions in fields are counted where they are chosen.
      count: `'outputs'`: every float array that a layer returns; `'inputs'`: the first float array of at least one
        dimension that it is given, as the layer itself sees it, after all pruning. Layers without one are left out.
      call: how to run the model, a function of the model and the arguments, where that is another way. An Equinox
        model is mapped over a batch by `call=lambda model, x: jax.vmap(model)(x)`.
      **kwargs: named arguments of the model.

    Returns:
      `{'Conv_0': sparsity}` for each layer, `'_total_sparsity'`, `'_nactivations'` (number of activations) and
      `'_nactivations_nnz'` (those that are not zero), as Python floats and integers.

    Raises:
      ValueError: `where` matches no layer, or `count` is neither.
      TypeError: a jitted function, arguments traced by `jax.jit`, or something that is no model.

    >>> import flax.linen as nn
    >>> model, x = nn.Sequential([nn.Dense(4, kernel_init=nn.initializers.zeros)]), jnp.ones((2, 3))
    >>> summarize_activations(model, model.init(jax.random.key(0), x), x)
    {'layers_0': 1.0, '_total_sparsity': 1.0, '_nactivations': 8, '_nactivations_nnz': 0}
    """
    if any(map(tree_lib.is_traced, jax.tree.leaves((args, kwargs)))):
        raise TypeError(
            'summarize_activations runs the model and reads what comes out; call it outside jax.jit'
        )
    if count not in ('outputs', 'inputs'):
        raise ValueError(f"count must be 'outputs' or 'inputs', got {count!r}")
    entries = layers_lib.read_where(where)
    action = _Counting(count)
    tap = calls.Tap(
        entries, action, token=(entries, action), refuses=False, innermost=count == 'inputs'
    )
    model = models.tapped(apply_fn_or_module, tap)
    if call is None:
        counts = _recorded(model if callable(model) else model.apply, args, kwargs)
    else:
        counts = _recorded(call, (model, *args), kwargs)
    framework = models.framework_of(apply_fn_or_module)
    if not counts and framework in ('function', 'linen', 'haiku'):
        layers_lib.refuse_call(entries, tap.called, framework)
    return _summary(counts)


def _summary(counts: dict[str, list[int]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    total_nonzero = 0
    total_size = 0
    for name, (nonzero, size) in counts.items():
        if size:
            summary[name] = (size - nonzero) / size
        total_nonzero += nonzero
        total_size += size
    summary['_total_sparsity'] = (total_size - total_nonzero) / total_size if total_size else 0.0
    summary['_nactivations'] = total_size
    summary['_nactivations_nnz'] = total_nonzero
    return summary


# Layer -> numbers of non-zeros and of activations. It is global since compiled functions outlive a report, and since
# their callbacks come in threads of their own. The lock lets one report run at a time. If `call` kept a compiled model
# of an earlier report, and it runs in another thread meanwhile, its activations are counted, too.
_counts: dict[str, list[int]] = {}
_lock = threading.RLock()


def _recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, list[int]]:
    """What arrives while a function runs."""
    with _lock:
        _counts.clear()
        function(*args, **kwargs)
        jax.effects_barrier()
        return {name: list(numbers) for name, numbers in _counts.items()}


@dataclasses.dataclass(frozen=True)
class _Counting:
    """The action that counts what a layer returns or is given."""

    count: str

    def __call__(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.count == 'inputs':
            _record(name, [])  # in the order of the calls, whatever it is given
            layer_pruning.with_first_float_array(functools.partial(_record, name), args, kwargs)
            return function(*args, **kwargs)
        outputs = function(*args, **kwargs)
        _record(name, outputs)
        return outputs


def _record(name: str, arrays: Any) -> None:
    _counts.setdefault(name, [0, 0])  # in the order of the calls
    for leaf in jax.tree.leaves(arrays):
        if hasattr(leaf, 'dtype') and jnp.issubdtype(leaf.dtype, jnp.inexact):
            jax.debug.callback(_Arrival(name), _count(jax.lax.stop_gradient(jnp.asarray(leaf))))


@dataclasses.dataclass(frozen=True)
class _Arrival:
    name: str

    def __call__(self, numbers: Any) -> None:
        entry = _counts.setdefault(self.name, [0, 0])
        for i in (0, 1):
            entry[i] += int(numbers[i])


@custom_batching.custom_vmap
def _count(x: jax.Array) -> jax.Array:
    """Numbers of non-zeros and of elements, exact below 2^32; of a whole batch at once under `jax.vmap`."""
    return jnp.stack([jnp.sum(x != 0, dtype=jnp.uint32), jnp.uint32(x.size)])


@_count.def_vmap
def _count_batch(axis_size: int, in_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _count(x), False
