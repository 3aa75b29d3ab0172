"""Layers of an existing model made to prune their activations, or to count them, without a change to the model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.activations import layers as layers_lib
from jaxpruner.activations import pruning


def sparsify_activations(
    apply_fn_or_module: Any,
    where: Any,
    *,
    density: Any = None,
    pattern: Any = None,
    prune: str = 'outputs',
    batch_axes: int | Sequence[int] | str | None = 'auto',
    axis: int | None = None,
    straight_through: bool = False,
) -> Any:
    """Prunes the activations of chosen layers of a model: `prune_act_unstruct` or `prune_act_struct` at each call.

    The model is not changed. Parameters, their paths and checkpoints fit both it and the result. A layer that is chosen
    several times is pruned by the first setting first.

    Args:
      apply_fn_or_module: a flax module (linen or nnx), an Equinox module, an `hk.Transformed` or
        `hk.TransformedWithState`; or a function that calls layers of linen or Haiku, such as `model.apply`. Not a
        jitted function: put `jax.jit` around the result.
      where: the layers: a name or glob on their paths (`'Dense_0'`, `'encoder/*'`, also `'encoder-Dense_0'`; a glob
        never means the model itself), a class, a predicate `(name, layer) -> bool`, or a list of those; methods other
        than `__call__` are not seen. In nnx and Equinox models functions held in fields can be chosen, too: by the
        function itself (`nnx.relu`), or by a name of which the last part is written out (`'layers/1'`,
        `'blocks/*/activation'`).
      density: share kept, in (0, 1].
      pattern: `(n, m)`, `'n:m'` or an `NByM` instead of a density.
      prune: `'outputs'`: every float array of at least one dimension that a layer returns; `'inputs'`: the first float
        array that it is given, which is what a layer after a ReLU consumes.
      batch_axes: the axes that count examples, with a density; by default 0, for an Equinox module, which sees one
        example, `None`.
      axis: the axis along which groups lie, with a pattern; by default that of the `NByM`, or the last.
      straight_through: gradients pass everywhere, not only through what was kept.

    Returns:
      The same kind of thing as was given, with these limits. For a linen module: an object whose `apply` and
      `init_with_output` prune and whose `clone` and `copy` are of its kind. It is no `nn.Module`: it cannot be called,
      bound, or be a submodule; other attributes, such as `init`, are the module's own and prune nothing. For nnx and
      Equinox: a model in which the chosen layers are of another class. It cannot be pickled: pickle the original, and
      sparsify what is loaded. An Equinox model becomes another type of tree, which optimizer states and gradients of
      the original do not fit.

    Raises:
      ValueError: a value out of its range; both or none of density and pattern, or an axis setting of the other one;
        an entry of `where` that matches no layer: in functions, linen and Haiku none that has been called when a call
        ends, in nnx and Equinox none of the model.
      TypeError: a value of the wrong type, or a jitted function.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
    >>> sparse = sparsify_activations(model, 'layers_2', density=0.5)
    >>> x = jnp.ones((2, 3))
    >>> int(jnp.count_nonzero(sparse.apply(sparse.init(jax.random.key(0), x), x)))
    4
    """
    if (density is None) == (pattern is None):
        got = 'neither' if density is None else f'density={density!r} and pattern={pattern!r}'
        raise ValueError(
            f"give one of density (such as 0.5) and pattern (such as '2:4'), got {got}"
        )
    if prune not in ('inputs', 'outputs'):
        raise ValueError(f"prune must be 'outputs' or 'inputs', got {prune!r}")
    is_auto = isinstance(batch_axes, str) and batch_axes == 'auto'
    if (pattern is not None and not is_auto) or (density is not None and axis is not None):
        raise ValueError(
            'batch_axes is for a density, which ranks whole examples, and axis for a pattern, whose groups lie along '
            f'it; got batch_axes={batch_axes!r} and axis={axis!r}'
        )
    if pattern is not None:
        pattern = sparsity_types.parse_n_by_m(pattern, axis)
    elif density is not None:
        sparsity_distributions.check_density(density, 'density')
        density = density if tree_lib.is_traced(density) else float(density)
    if is_auto:
        batch_axes = None if known_framework(apply_fn_or_module) == 'equinox' else 0
    function = _Pruning(density, pattern, pruning.read_axes(batch_axes), straight_through)
    action = layers_lib.Action(prune, function, is_required=True)
    return tapped(apply_fn_or_module, layers_lib.Tap(layers_lib.read_where(where), action))


@dataclasses.dataclass(frozen=True)
class _Pruning:
    """Prunes an array of a layer, whose name is for messages."""

    density: Any  # either it or the pattern is None
    pattern: sparsity_types.NByM | None
    batch_axes: tuple[int, ...]
    straight_through: bool

    def __call__(self, name: str, x: Any) -> Any:
        if not x.ndim:
            return x
        where = f'layer {name!r}: '
        try:
            if self.pattern is not None:
                return pruning.keep_groups(x, self.pattern, self.straight_through, where)
            return pruning.prune_act_unstruct(
                x, self.density, batch_axes=self.batch_axes, straight_through=self.straight_through
            )
        except ValueError as error:
            raise ValueError(f'{where}{error}') from error


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
    if tree_lib.has_traced((args, kwargs)):
        raise TypeError(
            'summarize_activations runs the model and reads what comes out; call it outside jax.jit'
        )
    if count not in ('outputs', 'inputs'):
        raise ValueError(f"count must be 'outputs' or 'inputs', got {count!r}")
    entries, counts = layers_lib.read_where(where), dict[str, list[int]]()

    def record(name: str, x: Any) -> Any:
        """Counts the non-zeros and all activations of an array when it arrives, and returns it."""
        total = counts.setdefault(name, [0, 0])  # in the order of the calls

        def add(numbers: Any) -> None:
            total[:] = [old + int(new) for old, new in zip(total, numbers, strict=True)]

        nonzero = jnp.sum(jnp.asarray(x) != 0, dtype=jnp.uint32)
        jax.debug.callback(add, (nonzero, jnp.uint32(x.size)))
        return x

    tap = layers_lib.Tap(entries, layers_lib.Action(count, record, is_required=False))
    model = tapped(apply_fn_or_module, tap)
    if call is not None:
        call(model, *args, **kwargs)
    else:
        (model if callable(model) else model.apply)(*args, **kwargs)
    jax.effects_barrier()
    if not counts and not tap.matched:
        layers_lib.refuse(entries[0], tap.called)
    summary: dict[str, Any] = {
        name: (size - nonzero) / size for name, (nonzero, size) in counts.items() if size
    }
    total_nonzero = sum(nonzero for nonzero, _ in counts.values())
    total_size = sum(size for _, size in counts.values())
    return summary | {
        '_total_sparsity': (total_size - total_nonzero) / total_size if total_size else 0.0,
        '_nactivations': total_size,
        '_nactivations_nnz': total_nonzero,
    }


# Models of all libraries.


def known_framework(model: Any) -> str | None:
    """The framework of a model, `'linen'`, `'haiku'`, `'nnx'` or `'equinox'`; `None` for anything else."""
    is_instance = tree_lib.is_instance
    if isinstance(model, layers_lib.TappedModule) or is_instance(model, 'flax.linen', 'Module'):
        return 'linen'
    if is_instance(model, 'haiku', 'Transformed', 'TransformedWithState'):
        return 'haiku'
    if is_instance(model, 'flax.nnx', 'Module'):
        return 'nnx'
    return 'equinox' if is_instance(model, 'equinox', 'Module') else None


def tapped(model: Any, tap: layers_lib.Tap) -> Any:
    """Puts a tap on the layers of a model: the same kind of object as was given."""
    framework = known_framework(model)
    if framework == 'linen':
        return layers_lib.TappedModule(model, tap)
    if framework == 'haiku':
        return model._replace(apply=layers_lib.tapped_function(model.apply, tap))
    if framework is not None:
        return layers_lib.tapped_model(model, tap)
    if not callable(model) or isinstance(model, type):
        raise TypeError(
            'expected a flax or Equinox module (an object, no class), an hk.Transformed, or a function such as '
            f'model.apply, got {model!r}'
        )
    return layers_lib.tapped_function(model, tap)
