"""A model and its first batch: which leaves it contracts with data, and which of them a pruner prunes."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings, mask_calculator, sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.oneshot.matrices import (
    UnknownWeightsError,
    WeightMatrices,
    check_ranking,
    find_matrices,
)
from jaxpruner.plan import PruningPlan
from jaxpruner.sparsity_types import INPUT_AXIS, NByM
from jaxpruner.trace import UnsupportedPrimitive, UseGraph, param_uses, with_input_axes

# A glob or a path, or several.
Names = str | Sequence[str | tree_lib.Path]

_ALL = '*'  # names nothing in particular
_DEFAULT_AXIS = -1  # of `NByM`; whether a user has written it does not show
_UNUSED = 'it has no part in what apply_fn returns'
_NOT_CONTRACTED = 'no contraction reads it'
_EMPTY = 'it has no weights'
_LOOKED_UP = 'data look up its rows (an embedding); a setting that names it prunes it'
_NOT_CALIBRATED = 'the calibration has no statistics of it'


def first_batch(batches: Any) -> tuple[Any, Any]:
    """Takes the first batch; returns it, and an iterable that can be read once, of all batches, the first included.

    Raises:
      TypeError: what is given is no iterable of batches; an array or a mapping is a single one.
      ValueError: there are no batches.
    """
    is_one = isinstance(batches, Mapping) or hasattr(batches, 'shape')
    if is_one or not isinstance(batches, Iterable):
        given = f'one {type(batches).__name__}' if is_one else repr(batches)
        raise TypeError(f'batches is an iterable of batches, such as batches=[x]; got {given}')
    iterator = iter(batches)
    for first in iterator:
        # What has no length can perhaps be read only once.
        return first, batches if isinstance(batches, Sized) else itertools.chain([first], iterator)
    raise ValueError('batches are empty; give at least one')


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """Takes the inputs out of a batch: a plain tuple holds them, anything else, a NamedTuple, too, is the only one."""
    return batch if type(batch) is tuple else (batch,)


def check_inputs(function: Callable[..., Any], batch: Any, name: str = 'apply_fn') -> None:
    """Refuses a batch that holds other inputs than `function(params, *inputs)` takes."""
    try:
        inspect.signature(function).bind(None, *as_inputs(batch))
    except ValueError:  # of functions that are not written in Python
        return
    except TypeError as error:
        given = jax.tree.map(jnp.shape, batch)
        raise TypeError(
            f'{name} does not take the first batch, of shapes {given}: {error}. A batch of several inputs is a plain '
            f'tuple, batches=[(x, y), …]; of a mapping take them out, lambda params, batch: {name}(params, '
            f"batch['x']); settings are bound by functools.partial({name}, train=…)"
        ) from None


def shapes_of(inputs: Any) -> Any:
    """Lists shapes and dtypes of inputs, to be compared."""
    return jax.tree.map(lambda array: (jnp.shape(array), jnp.result_type(array)), inputs)


class FollowedLeaves(NamedTuple):
    """How a model uses some leaves; each is in exactly one of `matrices` and `reasons`.

    Attributes:
      matrices: of leaves that contractions read, their weight matrices.
      reasons: why there are none of the others: embeddings, biases, norms; leaves of which it is not clear which weight
        meets which input; leaves that have no part in the results.
      looked_up: leaves of the whole model of which data look up rows; a tied embedding has matrices, too.
    """

    matrices: dict[tree_lib.Path, tuple[WeightMatrices, ...]]
    reasons: dict[tree_lib.Path, str]
    looked_up: frozenset[tree_lib.Path]

    @property
    def unclear(self) -> dict[tree_lib.Path, str]:
        """The leaves of which it is not clear which weight meets which input, and the reason."""
        clear = _UNUSED, _NOT_CONTRACTED, _EMPTY
        return {path: reason for path, reason in self.reasons.items() if reason not in clear}

    @property
    def all_matrices(self) -> list[WeightMatrices]:
        """The weight matrices of all leaves."""
        return [part for matrices in self.matrices.values() for part in matrices]

    def among(self, paths: Iterable[tree_lib.Path]) -> 'FollowedLeaves':
        """Picks some of the leaves that were calibrated."""
        matrices = {path: self.matrices[path] for path in paths if path in self.matrices}
        others = [path for path in paths if path not in matrices]
        reasons = {path: self.reasons.get(path, _NOT_CALIBRATED) for path in others}
        return FollowedLeaves(matrices, reasons, self.looked_up)


@contextlib.contextmanager
def ignore_vectors() -> Iterator[None]:
    """Ignores the warning that a filter takes stacked biases and norms for kernels: no contraction reads them."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.*looks like a bias or norm')
        yield


class Model(NamedTuple):
    """A model, traced with the first of its batches."""

    apply_fn: Callable[..., Any]
    params: tree_lib.PyTree
    batches: Iterable[Any]  # that can be read once, the first included
    graph: UseGraph


def trace_model(apply_fn: Any, params: tree_lib.PyTree, batches: Iterable[Any]) -> Model:
    """Traces a model with the first batch; refuses one with another number of inputs."""
    first, batches = first_batch(batches)
    check_inputs(apply_fn, first)
    return Model(apply_fn, params, batches, param_uses(apply_fn, params, *as_inputs(first)))


def follow_leaves(graph: UseGraph, paths: Iterable[tree_lib.Path]) -> FollowedLeaves:
    """Sorts leaves by what the model does with them.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.trace import param_uses
    >>> params = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2), 'old': jnp.ones(2)}
    >>> graph = param_uses(lambda params, x: x @ params['w'] + params['b'], params, jnp.ones((4, 3)))
    >>> followed = follow_leaves(graph, [('w',), ('b',), ('old',)])
    >>> list(followed.matrices), followed.reasons[('b',)]
    ([('w',)], 'no contraction reads it')
    """
    matrices, reasons = {}, {}
    for path in paths:
        if path in graph.unused or path in graph.opaque:
            reasons[path] = graph.opaque.get(path, _UNUSED)
            continue
        try:
            found = find_matrices(graph, path)
        except UnknownWeightsError as error:
            reasons[path] = str(error)
            continue
        if found and math.prod(found[0].shape):
            matrices[path] = found
        else:
            reasons[path] = _EMPTY if found else _NOT_CONTRACTED
    looked_up = [path for path, uses in graph.items() if any(use.op == 'gather' for use in uses)]
    return FollowedLeaves(matrices, reasons, frozenset(looked_up))


def follow_named_leaves(
    graph: UseGraph, only: Sequence[str | tree_lib.Path] | str | None = None
) -> FollowedLeaves:
    """Sorts the leaves that names, globs or paths match; by default all leaves.

    Raises:
      ValueError: a name matches no leaf, or no matrix can be read from a leaf that is named in full, or from any.
      UnsupportedPrimitive: a leaf that is named in full goes through an operation that is not understood.
    """
    paths: list[tree_lib.Path] = [*graph, *graph.opaque, *graph.unused]
    names = (_ALL,) if only is None else tree_lib.as_names(only)
    if only is not None:
        tree_lib.check_names(names, paths, 'only')
    followed = follow_leaves(graph, [path for path in paths if tree_lib.matches_any(names, path)])
    for path, reason in followed.unclear.items():
        name = tree_lib.path_string(path)
        if path in names or name in names or not followed.matrices:
            kind = UnsupportedPrimitive if path in graph.opaque else ValueError
            raise kind(f'{name}: {reason}; leave the leaf dense ({dense_setting([path])})')
    return followed


def warn_of_dense(algorithm: str, followed: FollowedLeaves, unclear: Mapping[Any, str]) -> None:
    """Warns once of leaves that the model does not use or that are unclear; refuses a model that uses none."""
    unused = {path: reason for path, reason in followed.reasons.items() if reason == _UNUSED}
    if unused and unused == followed.reasons and not followed.matrices:
        names = ', '.join(map(tree_lib.path_string, unused))
        raise ValueError(
            f'{algorithm}: what apply_fn returns does not depend on the leaves that are to be pruned '
            f'({names}), so that it does not use its first argument. Apply the model to the params that it is given: '
            'lambda params, x: model.apply(params, x); with nnx merge them first: nnx.merge(graphdef, params)(x)'
        )
    if dense := unused | dict(unclear):
        reasons = [f'{tree_lib.path_string(path)}: {reason}' for path, reason in dense.items()]
        caller_warnings.warn(
            f'these leaves stay dense: {"; ".join(reasons)}. A setting that leaves them out avoids this warning, such '
            f'as {dense_setting(dense)}'
        )


def dense_setting(paths: Iterable[tree_lib.Path]) -> str:
    """Writes the setting under which some leaves stay dense."""
    keys = [f"'{tree_lib.path_string(path)}': None" for path in paths]
    return f"sparsity_type={{{', '.join(keys)}, '*': …}}"


def sparsities_by_name(
    params: tree_lib.PyTree,
    sparsities: Mapping[Any, float | None],
    filter_fn: Callable[[tree_lib.Path, Any], bool] = sparsity_distributions.NOT_DIM_ONE_FILTER,
    stacked: tree_lib.Stacked = (),
) -> tree_lib.PyTree:
    """Makes a distribution that gives each leaf the sparsity of the first name that matches it, `None` for dense.

    Leaves that no name matches stay dense. Of those that a glob matches `filter_fn` selects some (it sees one layer of
    a stacked leaf), of floats alone; a leaf that is named in full is pruned whatever its shape and dtype.

    Raises:
      ValueError: a sparsity outside [0, 1], or a name that matches no leaf, or only leaves that earlier names take.

    >>> import jax.numpy as jnp
    >>> params = {'a': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}, 'b': {'kernel': jnp.ones((2, 2))}}
    >>> sparsities_by_name(params, {'a/*': 0.5})
    {'a': {'bias': None, 'kernel': 0.5}, 'b': {'kernel': None}}
    """
    rules = sparsity_distributions.check_custom_map(sparsities, 'sparsity')
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    targets: dict[int, float | None] = tree_lib.values_by_leaf(rules, paths, 'sparsity')
    axes = tree_lib.layer_axes(stacked, paths, [leaf.shape for leaf in leaves])
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        layer = jax.ShapeDtypeStruct(tree_lib.layer_shape(leaf.shape, axes[i]), leaf.dtype)
        is_full_name = path in rules or tree_lib.path_string(path) in rules
        if not is_full_name and not (tree_lib.holds_weights(layer) and filter_fn(path, layer)):
            targets[i] = None
    return tree_lib.unflatten(treedef, map(targets.get, range(len(leaves))), leaves)


def block_of(path: tree_lib.Path, blocks: Sequence[Names]) -> int | None:
    """Finds the number of the first block that names a leaf, `None` if none does.

    >>> block_of(('layer_1', 'w'), ['layer_0/*', ('layer_1/*', 'head')])
    1
    """
    matching = (n for n, names in enumerate(blocks) if tree_lib.matches_any(names, path))
    return next(matching, None)


def with_types(pruner: BaseUpdater, types: Mapping[tree_lib.Path, Any]) -> Any:
    """Copies a pruner, with these sparsity types of leaves; all others stay dense."""
    pruner = copy.copy(pruner)
    pruner.sparsity_type = lambda path, leaf: types.get(path)
    return pruner


def selected_leaves(pruner: BaseUpdater, params: tree_lib.PyTree) -> list[tree_lib.Path]:
    """Lists the leaves that a pruner selects, whatever the axes of their types."""
    leaves = pruner.describe_leaves(*tree_lib.flatten_with_paths(tree_lib.as_arrays(params))[:2])
    any_type = sparsity_types.Unstructured()
    types = {leaf.path: leaf.sparsity_type and any_type for leaf in leaves}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the same checks are made once more
        plan = plan_of_types(pruner, params, types)
    return [leaf.path for leaf in plan if leaf.target is not None or leaf.is_pruned]


def follow_model(
    pruner: BaseUpdater, params: tree_lib.PyTree, apply_fn: Any, batches: Any
) -> tuple[FollowedLeaves, Model]:
    """Sorts the leaves that a pruner selects by what the model does with them; returns the traced model, too."""
    if apply_fn is None or batches is None:
        raise ValueError(
            f'{type(pruner).__name__}: give the model and data together, both apply_fn=… and batches=…'
        )
    model = trace_model(apply_fn, params, batches)
    return follow_leaves(model.graph, selected_leaves(pruner, params)), model


def plan_with_model(pruner: BaseUpdater, params: Any, apply_fn: Any, batches: Any) -> PruningPlan:
    """Tells what a pruner will do with a model."""
    followed, model = follow_model(pruner, params, apply_fn, batches)
    if pruner.finds_input_axes:
        return plan_of_matrices(pruner, params, followed, model.graph)
    return plan_of_types(pruner, params, *along_inputs(pruner, params, followed, model.graph))


def plan_of_matrices(
    pruner: Any, params: tree_lib.PyTree, followed: FollowedLeaves, graph: UseGraph | None = None
) -> PruningPlan:
    """Tells what a calibrated pruner will do with the leaves that it selects, and that were followed.

    Those are pruned of which it is clear which weight meets which input. N:M lies along the inputs, whatever axis is
    named; the graph says which axes these are. Lookups (embeddings), tied ones, too, stay dense unless a setting names
    them.

    Raises:
      ValueError: the model uses none of the leaves, or sparsities or shapes do not fit.
    """
    types, why_dense, fits = {}, {}, {}
    for leaf in pruner.describe_leaves(*tree_lib.flatten_with_paths(params)[:2]):
        path, kind = leaf.path, along_any_inputs(leaf.sparsity_type)
        if reason := _why_dense(pruner, followed, path):
            why_dense[path] = reason
            continue
        types[path] = kind
        if path in followed.matrices:
            with contextlib.suppress(ValueError):  # parts of it are summed along several axes
                own = dataclasses.replace(leaf, sparsity_type=kind)
                types[path] = _along_own_inputs(own, graph).sparsity_type if graph else kind
            # What divides the inputs of all its matrices divides their greatest common divisor.
            inputs = math.gcd(*[part.shape[-2] for part in followed.matrices[path]])
            fits[path] = functools.partial(check_ranking, kind, pruner.per, inputs, leaf.name)
    if followed.unclear or _UNUSED in followed.reasons.values():
        warn_of_dense(type(pruner).__name__, followed, followed.unclear)
    sparsity_types.check_each(fits)
    return plan_of_types(pruner, params, types, why_dense)


def along_inputs(
    pruner: BaseUpdater, params: tree_lib.PyTree, followed: FollowedLeaves, graph: UseGraph
) -> tuple[dict[tree_lib.Path, Any], dict[tree_lib.Path, str]]:
    """Chooses the types of leaves for a pruner that looks at weights alone; tells why others stay dense.

    N:M groups lie along the axis that the model sums over. An axis that was named stays: `NByM(2, 4, axis=1)`. But
    `NByM(2, 4, axis=-1)` equals `NByM(2, 4)`, so that the last axis can only be named by its positive number. Of the
    leaves that the pruner selects, those that no contraction reads stay dense, and lookups (embeddings), tied ones,
    too, unless a setting names them.

    Args:
      pruner: what is to be pruned by the types.
      params: the parameters, or their shapes.
      followed: the leaves that the pruner selects, followed through the model.
      graph: of the model.

    Raises:
      ValueError: the model uses none of the leaves, or sparsities or shapes do not fit.
    """
    types, why_dense, unclear, fits = {}, {}, {}, {}
    for leaf in pruner.describe_leaves(*tree_lib.flatten_with_paths(params)[:2]):
        path, reason = leaf.path, _why_dense(pruner, followed, leaf.path)
        if reason and path not in followed.unclear:
            why_dense[path] = reason
            continue
        is_selected = path in followed.matrices or path in followed.reasons
        try:
            leaf = _along_own_inputs(leaf, graph) if is_selected else leaf
        except (UnsupportedPrimitive, ValueError) as error:
            unclear[path] = why_dense[path] = str(error).removeprefix(f'{leaf.name}: ')
            continue
        types[path] = leaf.sparsity_type
        if is_selected:
            fits[path] = leaf.check_shape
    warn_of_dense(type(pruner).__name__, followed, unclear)
    if mask_calculator.own_topk_fn(pruner.topk_fn) is None:
        sparsity_types.check_each(fits)
    return types, why_dense


def plan_of_types(pruner: Any, params: Any, types: Any, why_dense: Any = None) -> PruningPlan:
    """Tells what a pruner will do with these sparsity types of leaves, and why it was said that others stay dense."""
    with ignore_vectors():
        plan = BaseUpdater.plan(with_types(pruner, types), params)
    leaves = []
    for leaf in plan:
        reason = (why_dense or {}).get(leaf.path, leaf.why_dense)
        leaves.append(dataclasses.replace(leaf, why_dense=reason))
    return dataclasses.replace(plan, leaves=tuple(leaves))


def _why_dense(pruner: BaseUpdater, followed: FollowedLeaves, path: tree_lib.Path) -> str | None:
    """Tells why a leaf that was followed stays dense. A setting that names it prunes what can be pruned."""
    reason = followed.reasons.get(path)
    if path not in followed.matrices and reason != _NOT_CONTRACTED:
        return reason
    if _is_named(pruner, path):
        return reason if pruner.finds_input_axes else None
    return _LOOKED_UP if path in followed.looked_up else reason


def _is_named(pruner: BaseUpdater, path: tree_lib.Path) -> bool:
    """Whether a setting names a leaf: custom sparsities, sparsity types, or a distribution of the user's own."""
    distribution = pruner.distribution()
    function = distribution.func if isinstance(distribution, functools.partial) else distribution
    ours = sparsity_distributions.uniform, sparsity_distributions.erk, sparsities_by_name, None
    if function not in ours:
        return True
    keywords = getattr(distribution, 'keywords', {})
    custom = sparsity_distributions.check_custom_map(keywords.get('custom_sparsity_map'))
    types = pruner.sparsity_type if isinstance(pruner.sparsity_type, Mapping) else {}
    for rules in (custom, keywords.get('sparsities', {}), types):
        name = next((name for name in rules if tree_lib.matches(name, path)), _ALL)
        if name != _ALL and rules[name] is not None:
            return True
    return False


def along_any_inputs(kind: sparsity_types.SparsityType | None) -> Any:
    """Lets N:M lie along the inputs, whatever axis these are."""
    return dataclasses.replace(kind, axis=INPUT_AXIS) if isinstance(kind, NByM) else kind


def _along_own_inputs(leaf: sparsity_types.Leaf, graph: UseGraph) -> sparsity_types.Leaf:
    """Lets N:M without an axis of its own lie along the axis that the model sums over.

    Raises:
      UnsupportedPrimitive, ValueError: that axis is unknown.
    """
    own, path = leaf.sparsity_type, leaf.path
    if not isinstance(own, NByM) or own.axis not in (_DEFAULT_AXIS, INPUT_AXIS):
        return leaf
    asked = along_any_inputs(own)
    array = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    found = with_input_axes(lambda path, leaf: asked, graph)(path, array)
    if found is None and any(use.contract for use in graph[path]):
        raise ValueError('a depthwise convolution sums over no channels')
    # A leaf that is named and in no contraction has no inputs.
    found = dataclasses.replace(own, axis=_DEFAULT_AXIS) if found is None else found
    return dataclasses.replace(leaf, sparsity_type=found)
