"""Layers of an existing model made to prune their activations, without a change to the model or its library."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.activations import calls, layer_pruning
from jaxpruner.activations import layers as layers_lib

# A library, a class of its models, and the file here that knows them. A library that is not imported is not asked.
_MODEL_CLASSES = (
    ('flax.linen', 'Module', 'linen'),
    ('jaxpruner.activations.linen', 'TappedModule', 'linen'),
    ('haiku', 'Transformed', 'haiku'),
    ('haiku', 'TransformedWithState', 'haiku'),
    ('flax.nnx', 'Module', 'nnx'),
    ('equinox', 'Module', 'equinox'),
)


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

    The model is not changed. Parameters, their paths and checkpoints fit both it and the result.

    Args:
      apply_fn_or_module: a flax module (linen or nnx), an Equinox module, an `hk.Transformed` or
        `hk.TransformedWithState`; or a function that calls layers of linen or Haiku, such as `model.apply`. Not a
        jitted function: put `jax.jit` around the result.
      where: the layers: a name or glob on their paths (`'Dense_0'`, `'encoder/*'`, also `'encoder-Dense_0'`; a glob
        never means the model itself), a class, a predicate `(name, layer) -> bool`, or a list of those. A linen or
        Haiku method other than `__call__` has to be named, `'Embed_0.attend'`. In nnx and Equinox models functions
        held in fields can be chosen, too: by the function itself (`nnx.relu`), or by a name of which the last part is
        written out (`'layers/1'`, `'blocks/*/activation'`).
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
        an entry of `where` that matches no layer: of a call, in functions, linen and Haiku (layers inside compiled
        functions count once for all calls); of the model, in nnx and Equinox.
      TypeError: a value of the wrong type, or a jitted function.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
    >>> sparse = sparsify_activations(model, 'layers_2', density=0.5)
    >>> x = jnp.ones((2, 3))
    >>> int(jnp.count_nonzero(sparse.apply(sparse.init(jax.random.key(0), x), x)))
    4
    """
    framework = framework_of(apply_fn_or_module)
    if framework in ('nnx', 'equinox') and tree_lib.is_traced(density):
        raise TypeError(
            f'density of an {framework} model must be known before it is traced, got {density!r}'
        )
    action = layer_pruning.read_pruning(
        density=density,
        pattern=pattern,
        prune=prune,
        batch_axes=batch_axes,
        axis=axis,
        straight_through=straight_through,
        default_batch_axes=None if framework == 'equinox' else 0,
    )
    return tapped(apply_fn_or_module, calls.Tap(layers_lib.read_where(where), action))


def framework_of(model: Any) -> str:
    """The framework of a model, `'linen'`, `'haiku'`, `'nnx'` or `'equinox'`, or `'function'`; imports no library.

    Raises:
      TypeError: it is none of these.
    """
    framework = known_framework(model)
    if framework is not None:
        return framework
    if not callable(model) or isinstance(model, type):
        given = repr(model)
        if isinstance(model, type):
            given = f'the class {model.__name__}; make a model of it'
        raise TypeError(
            'expected a flax or Equinox module, an hk.Transformed, or a function such as model.apply, got '
            f'{given}'
        )
    return 'function'


def known_framework(model: Any) -> str | None:
    """As `framework_of`, but `None` for what is no model of a framework."""
    for library, class_name, framework in _MODEL_CLASSES:
        module = sys.modules.get(library)
        if module is not None and isinstance(model, getattr(module, class_name)):
            return framework
    return None


def tapped(model: Any, tap: calls.Tap) -> Any:
    """The model with a tap on its layers: the same kind of object as was given."""
    framework = framework_of(model)
    if framework == 'function':
        return calls.tapped(model, tap)
    return importlib.import_module(f'jaxpruner.activations.{framework}').tapped(model, tap)
