"""Every check of a setting, and every warning, of the core.

Settings are checked when a pruner is made, shapes and targets in `init` and before pruning once. An error names the
value, the place and the remedy. What would run to the end and prune nothing, or too little, is warned of once.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import (
    caller_warnings,
    mask_calculator,
    seeds,
    selection,
    sparsity_distributions,
    sparsity_schedules,
)
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import NByM, check_groups, is_joint, normalize_setting
from jaxpruner.tree import PyTree, holds_weights

# Settings: the fields of pruners and the keys of configurations.


def _expected(words, has_type, is_in_range=None):
    """Makes a check of a value by its type, and of a value of that type by its range."""

    def check(key, value):
        if not has_type(value):
            raise TypeError(f'{key} must be {words}, got {value!r}')
        if is_in_range and not tree_lib.is_traced(value) and not is_in_range(value):
            raise ValueError(f'{key} must be {words}, got {value!r}')

    return check


def _is_whole(value):
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_list_of(is_entry, value):
    return isinstance(value, list | tuple) and all(map(is_entry, value))


_is_text = lambda value: isinstance(value, str)  # noqa: E731
_is_name = lambda value: _is_text(value) or _is_list_of(_is_text, value)  # noqa: E731
_are_names = lambda value: _is_text(value) or _is_list_of(_is_name, value)  # noqa: E731
_are_blocks = lambda value: _is_list_of(_are_names, value)  # noqa: E731


def _are_stacks(value):
    if not isinstance(value, Mapping):
        return _are_names(value)
    return all(map(_is_name, value)) and all(map(_is_whole, value.values()))


def _scheduler(key, value):
    for method in ('is_mask_update_iter', 'get_sparsity_at_step'):
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise TypeError(
                f'{key} must be an object with the method {method}, as the schedules of sparsity_schedules are, got '
                f'{value!r}'
            )


def _distribution(key, value):
    """Refuses what is no distribution, and wrong numbers in the usual one, which is a partial with keywords."""
    _FUNCTION(key, value)
    keywords = getattr(value, 'keywords', {})
    for name in ('sparsity', 'filter_fn', 'custom_sparsity_map'):
        if keywords.get(name) is not None:
            SETTINGS[name](name, keywords[name])


def _sparsity_type(key, value):
    try:
        normalize_setting(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f'{key}: {error}') from error


def _one_of(*words):
    return _expected(' or '.join(map(repr, words)), _is_text, words.__contains__)


def _numbers(words, low, high=math.inf):
    is_in_range = lambda value: low <= float(value) <= high and math.isfinite(float(value))  # noqa: E731
    return _expected(words, tree_lib.is_number, is_in_range)


_FLAG = _expected('true or false', lambda value: isinstance(value, bool | np.bool_))
_FUNCTION = _expected('a function', callable)
_COUNT = _expected('a whole number from 1 up', _is_whole, lambda value: value >= 1)
_NOT_NEGATIVE = _numbers('a finite number from 0 up', 0)
_STEP = sparsity_schedules.checked_step
_sparsity = lambda key, value: sparsity_distributions.check_sparsity(value, key)  # noqa: E731

# Key -> (key, value) -> None, or an error that names both. First those that are alike.
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    key: check
    for check, keys in (
        (
            _FLAG,
            'skip_gradients is_sparse_gradients use_packed_masks is_packed count_excluded is_debug',
        ),
        (
            _FLAG,
            'normalize_scores use_normalization reset_optimizer reset_adam owl sequential keep_zeros',
        ),
        (_STEP, 'update_start_step update_end_step init_dense_steps_end final_sparse_steps_start'),
        (_STEP, 'cycle_sparse_steps cycle_dense_steps'),
        (_NOT_NEGATIVE, 'eps normalization_eps damping'),
        (_COUNT, 'block_size rounds'),
        (_sparsity, 'sparsity initial_sparsity'),
    )
    for key in keys.split()
}
SETTINGS |= {
    'algorithm': _expected("the name of an algorithm, such as 'magnitude'", _is_text),
    # How much of each leaf.
    'dist_type': _one_of('uniform', 'erk'),
    'filter_fn': _expected('a function (path, leaf) -> bool', callable),
    'custom_sparsity_map': lambda key, value: sparsity_distributions.check_custom_map(value),
    'sparsity_distribution_fn': _distribution,
    # When.
    'update_freq': functools.partial(_STEP, minimum=1),
    'power': lambda key, value: sparsity_schedules.check_power(value, key),
    'scheduler': _scheduler,
    # Which weights together.
    'sparsity_type': _sparsity_type,
    'stacked': _expected(
        'a glob of leaves, a list of globs, or a mapping from globs to axes', _are_stacks
    ),
    'topk_fn': _expected('a function (scores, sparsity) -> mask', callable),
    'rng_seed': lambda key, value: seeds.check_seed(value),
    # SET and RigL.
    'drop_fraction': _numbers(
        'a number between 0 and 1, the share of kept weights that is replaced', 0, 1
    ),
    'drop_fraction_fn': _expected(
        'a function of the step, such as optax.constant_schedule(0.3)', callable
    ),
    # Pruned once.
    'per': _one_of('output', 'layer'),
    'owl_per': _one_of('block', 'leaf'),
    'owl_multiple': _numbers('a finite number above 0', math.ulp(0.0)),
    'owl_deviation': _numbers('a number between 0 and 1', 0, 1),
    'blocks': _expected('a list with a glob or a list of globs for each block', _are_blocks),
}

# Field of a pruner -> keys of configurations that say the same.
SAID_BY = {
    'sparsity_distribution_fn': (
        'dist_type',
        'sparsity',
        'filter_fn',
        'custom_sparsity_map',
        'count_excluded',
    ),
    'scheduler': ('update_freq', 'update_start_step', 'update_end_step', 'initial_sparsity'),
    'drop_fraction_fn': ('drop_fraction',),
}
# Fields in which `None` has a meaning of its own, though it is not their default.
_MAY_BE_NONE = ('sparsity', 'sparsity_distribution_fn', 'sparsity_type')


def check_setting(algorithm: type, name: str, value: Any) -> None:
    """Refuses a value of the wrong type or out of range; a field of a user's class means what that class says.

    Raises:
      TypeError, ValueError: the message names the setting.
    """
    if name in SETTINGS and is_of_library(algorithm, name):
        SETTINGS[name](name, value)


def is_of_library(algorithm: type, field: str) -> bool:
    """Whether the class that declares a field, the first among an algorithm and its bases, is of this package."""
    for base in algorithm.__mro__:
        if field in inspect.get_annotations(base):
            return base.__module__.partition('.')[0] == 'jaxpruner'
    return True


def check_fields(pruner: Any) -> None:
    """Checks all fields of a pruner, without reading a seed that was not given (which starts JAX's backend)."""
    for field in dataclasses.fields(pruner):
        value = vars(pruner).get(field.name, None if field.name == 'rng_seed' else field.default)
        if value is None and (field.default is None or field.name in _MAY_BE_NONE):
            continue
        check_setting(type(pruner), field.name, value)


def check_no_topk_fn(pruner: Any, why: str) -> None:
    """Refuses a `topk_fn` for an algorithm that ranks by itself."""
    if mask_calculator.own_topk_fn(pruner.topk_fn) is not None:
        raise ValueError(f'{type(pruner).__name__} {why}: topk_fn has no meaning for it')


def check_drop_fraction(fraction: Any, name: str) -> None:
    """Refuses a drop fraction outside [0, 1]; traced values pass.

    Args:
      fraction: a number or scalar array.
      name: what it is called, for the message.

    >>> check_drop_fraction(0.3, 'drop_fraction')
    """
    SETTINGS['drop_fraction'](name, fraction)


def check_not_joint(pruner: Any, sparsity_type: Any, where: str) -> None:
    """Refuses types that remove a channel from all leaves, for an algorithm whose regrown weights start at zero.

    What makes such a channel and what reads it are zero together, so that all of its gradients are: nothing tells which
    one to grow, and a regrown one would not be trained.
    """
    if is_joint(sparsity_type):
        raise ValueError(
            f'{where}{type(pruner).__name__} lets channels come back at zero, where all of their gradients are zero '
            f'with {sparsity_type!r}; use MagnitudePruning or SaliencyPruning with a PolynomialSchedule'
        )


# Arguments.


def known_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Picks those arguments that a function takes by name.

    >>> known_arguments(lambda a, b: None, {'b': 1, 'c': 2})
    {'b': 1}
    """
    if not arguments:
        return {}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Calls a function with those of the named arguments that it takes.

    >>> call(lambda a, b: a + b, 1, b=2, c=3)
    3
    """
    return function(*arguments, **known_arguments(function, named))


def check_taken(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Refuses arguments that a function (`name` in the message) does not take: they would have no effect."""
    unused = sorted(set(arguments) - set(known_arguments(function, arguments)))
    if unused:
        raise TypeError(
            f'{name} does not take {", ".join(unused)}, which would have no effect; leave it out. To prune with a '
            'model and data, call jaxpruner.prune(params, sparsity, algorithm, apply_fn=…, batches=…)'
        )


def given_state(state: Any, other: Any) -> Any:
    """Returns the state that a method was given under one of its two names; refuses none and both."""
    if (state is None) == (other is None):
        raise TypeError('give the optimizer state once, as opt_state or as sparse_state')
    return other if state is None else state


def check_mixed_in_first(cls: type, mixin: type, base: type) -> None:
    """Refuses a class in which a mixin comes after the pruner, whose methods then hide those of the mixin."""
    bases = cls.__mro__
    if base in bases and bases.index(mixin) > bases.index(base):
        names = ', '.join(parent.__name__ for parent in cls.__bases__)
        raise TypeError(
            f'class {cls.__name__}({names}): {mixin.__name__} has no effect after a pruner; write it first, '
            f'class {cls.__name__}({mixin.__name__}, …)'
        )


# Targets.


def check_arrays(paths: Sequence[tree_lib.Path], leaves: Sequence[Any]) -> None:
    """Refuses leaves that are no arrays, such as the functions in a module of Equinox.

    >>> check_arrays([('w',)], [jnp.ones(2)])
    """
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, 'dtype'):
            raise TypeError(
                f'{tree_lib.path_string(path)}: {leaf!r} is no array; give arrays alone, for example '
                'equinox.filter(model, equinox.is_array)'
            )


# A sparsity that is a rounded share of N:M, such as 0.33 for 2:3, does not contradict it.
_ROUNDING = 0.005


def targets_of_leaves(
    distribution: Callable[..., Any] | None,
    params: PyTree,
    leaves: Sequence[Any],
    stacked: tree_lib.Stacked,
    check: Callable[[Sequence[Any]], None] = lambda pruned: None,
    types_decide: bool = True,
) -> list[Any]:
    """Lists the target of each leaf, `None` where dense; warns of those that contradict N:M, whose share holds.

    Args:
      distribution: from parameters (and the names of stacked leaves, if it takes them) to sparsities; `None` for none.
      params: the parameters, or their shapes.
      leaves: the same, as `describe_leaves` of a pruner tells them.
      stacked: which leaves are stacks of layers.
      check: refuses sparsity types of the leaves that are to be pruned.
      types_decide: N:M sets the target of its leaves to its share, but for a sparsity of 0 that a user gave.

    Raises:
      TypeError: a leaf is no array.
      ValueError: a sparsity outside [0, 1], or a name without a leaf.
    """
    check_arrays([leaf.path for leaf in leaves], jax.tree.leaves(params))
    if distribution is None:
        return [None] * len(leaves)
    paths, treedef = [leaf.path for leaf in leaves], jax.tree.structure(params)
    names = tree_lib.as_names(stacked)
    named = {'stacked': stacked if isinstance(stacked, Mapping) else names} if names else {}
    if known_arguments(distribution, named) != named:
        raise ValueError(
            'stacked layers change what a distribution selects, and this sparsity_distribution_fn takes no '
            'argument `stacked`; pass functools.partial(uniform, sparsity=…), or a function of params and stacked'
        )
    targets = tree_lib.leaves_like(treedef, distribution(params, **named))
    custom = sparsity_distributions.custom_sparsities(
        getattr(distribution, 'keywords', {}).get('custom_sparsity_map'), paths
    )
    can_be_ranked = []
    for i, leaf in enumerate(leaves):
        # Flags and random keys cannot be ranked.
        is_ranked = leaf.sparsity_type is not None and jnp.issubdtype(leaf.dtype, jnp.number)
        can_be_ranked.append(is_ranked)
        targets[i] = targets[i] if is_ranked else None
    filter_fn = sparsity_distributions.filter_of(distribution)
    if filter_fn is sparsity_distributions.NOT_DIM_ONE_FILTER:
        _warn_of_vectors(
            leaves, [i for i, t in enumerate(targets) if t is not None and i not in custom]
        )
    for sparsity_type, indices in mask_calculator.tied_leaves(leaves, can_be_ranked):
        shapes = {path: leaves[i].shape for path, i in indices.items()}
        tied = sparsity_type.targets_of(shapes, {path: targets[i] for path, i in indices.items()})
        for path, i in indices.items():
            targets[i] = tied[path]
    pruned = [leaf for leaf, target in zip(leaves, targets, strict=True) if target is not None]
    for leaf, target in zip(leaves, targets, strict=True):
        if target is not None:
            sparsity_distributions.check_sparsity(target, f'the sparsity of {leaf.name}')
    check(pruned)
    contradictions = []
    is_default = isinstance(distribution, sparsity_distributions.NotGiven)
    for i, leaf in enumerate(leaves):
        target, kind = targets[i], leaf.sparsity_type
        if not types_decide or target is None or not isinstance(kind, NByM):
            continue
        share, is_given = (kind.m - kind.n) / kind.m, not is_default or i in custom
        if tree_lib.is_traced(target):
            targets[i] = jnp.where(target == 0, 0.0, share)
        elif float(target) != 0 or not is_given:
            targets[i] = share
            if is_given and abs(float(target) - share) > _ROUNDING:
                words = f'{float(target):.4g}, where {kind.n}:{kind.m} removes {share:.4g}'
                contradictions.append(f'{leaf.name} ({words})')
    if contradictions:
        caller_warnings.warn(
            f'the sparsity of {_some_of(contradictions)} contradicts the sparsity type, whose share holds; leave the '
            'sparsity out, give that share, or choose another type'
        )
    return targets


def _warn_of_vectors(leaves, selected):
    """Warns once of leaves that the default filter takes for kernels, and that have the names of biases or norms.

    Either an axis counts layers that were stacked for a `scan`, and `stacked` does not say so, or a bias has axes of
    its own, as in attention.
    """
    vectors = []
    for leaf in (leaves[i] for i in selected):
        name, rank = leaf.path[-1], len(leaf.layer_shape)
        # Leaves that a type ties are not selected by the filter. In LoRA `a` and `b` are kernels.
        beside = [other.layer_shape for other in leaves if other.path[:-1] == leaf.path[:-1]]
        is_bias = name != 'b' or rank < max(map(len, beside))
        is_vector = name in sparsity_distributions.VECTOR_NAMES and is_bias
        if is_vector and rank > 1 and not is_joint(leaf.sparsity_type):
            vectors.append(leaf)
    if vectors:
        inside = '/'.join((*vectors[0].path[:-1], '*'))
        caller_warnings.warn(
            f'{_some_of([f"{leaf.name} {leaf.shape}" for leaf in vectors])} looks like a bias or norm, but has more '
            'than one dimension, so that the default filter takes it for a kernel. If an axis counts stacked layers, '
            f'name the leaves that have it: stacked={inside!r}, or {{{inside!r}: axis}} if it is not the first; else '
            'filter_fn=sparsity_distributions.NOT_BIAS_FILTER leaves such leaves dense. Any other filter_fn says that '
            'you have decided'
        )


def check_pruned(pruner: Any, pruned: Sequence[Any]) -> None:
    """Refuses leaves that a pruner is to prune and cannot, because of their dtype, sparsity type or shape."""
    for leaf in pruned:
        if pruner.needs_gradients and not holds_weights(leaf):
            raise ValueError(
                f'{leaf.name}: {type(pruner).__name__} scores weights by their gradients, and {leaf.dtype} has none; '
                f"leave it dense: sparsity_type={{'{leaf.name}': None, '*': …}}"
            )
        pruner.check_type(leaf.sparsity_type, f'{leaf.name}: ')
    if mask_calculator.own_topk_fn(pruner.topk_fn) is None and not pruner.finds_input_axes:
        shape_checks = {leaf.path: leaf.check_shape for leaf in pruned}
        check_groups(shape_checks, normalize_setting(pruner.sparsity_type))


# What prunes nothing, or too little.

_SEE_PLAN = 'print(pruner.plan(params)) shows each leaf'


def update_steps(schedule: Any) -> Sequence[int] | None:
    """Lists all steps at which masks are updated, in order (a range if they are many); `None` if it cannot be read."""
    return schedule.update_steps() if hasattr(schedule, 'update_steps') else None


def share_at_end(schedule: Any) -> float:
    """Computes how much of a target a schedule has reached at the last mask update; 1 where that cannot be told."""
    steps = update_steps(schedule)
    if not steps:
        return 1.0
    with jax.ensure_compile_time_eval():
        return float(schedule.get_sparsity_at_step(1.0, steps[-1]))


def reaches_target(schedule: Any) -> bool:
    """Whether masks are updated at all, and for the last time near the target, as far as can be told."""
    steps = update_steps(schedule)
    return (steps is None or len(steps) > 0) and share_at_end(schedule) >= 0.999


def warn_of_shortfall(name: str, schedule: Any) -> None:
    """Says that masks are updated for the last time before the schedule is at its target."""
    last = (update_steps(schedule) or (0,))[-1]
    caller_warnings.warn(
        f'{name} ends at {share_at_end(schedule):.1%} of its target: the last mask update comes at step {last}, the '
        f'last multiple of update_freq={schedule.update_freq}, and the schedule reaches its target at '
        f'update_end_step={schedule.update_end_step}. Give update_end_step={last + 1}'
    )


def check_plan(pruner: Any, plan: Any) -> None:
    """Warns where no leaf is pruned, masks are never updated, or the last update falls short of the target."""
    if not plan.pruned:
        _warn_that_nothing_is_pruned(plan)
        return
    # Masks that are made once, or in each forward pass, need no update.
    if (pruner.starts_sparse and not pruner.regrows_from_zero) or not pruner.lands_on_zero:
        return
    steps = update_steps(pruner.scheduler)
    if steps is not None and not steps:
        caller_warnings.warn(
            f'{plan.algorithm} never updates its masks, which stay as they are first made: {pruner.scheduler!r} has no '
            f'update step{_why_never(pruner.scheduler)}. Give a schedule that updates, such as '
            'PolynomialSchedule(update_freq, update_start_step, update_end_step); or call instant_sparsify to prune '
            'once without training, or pruner.new_masks where your own loop decides'
        )
    # Of N:M any sparsity above 0 means N of M.
    elif not pruner.starts_sparse and not reaches_target(pruner.scheduler):
        has_own_ranking = mask_calculator.own_topk_fn(pruner.topk_fn) is not None
        if has_own_ranking or not all(isinstance(leaf.sparsity_type, NByM) for leaf in plan.pruned):
            warn_of_shortfall(plan.algorithm, pruner.scheduler)


def _why_never(schedule):
    if not isinstance(schedule, sparsity_schedules.PeriodicSchedule):
        return ''
    start, end = schedule.update_start_step, schedule.update_end_step
    return f', since no multiple of update_freq={schedule.update_freq} lies from {start} to {end}'


def _warn_that_nothing_is_pruned(plan):
    if not len(plan):
        caller_warnings.warn(
            f'{plan.algorithm} prunes nothing: there are no parameters in the tree that init was given'
        )
        return
    names: dict[str, list[str]] = {}
    for leaf in plan:
        names.setdefault(str(leaf.why_dense), []).append(leaf.name)
    reasons = '; '.join(f'{_some_of(leaves)}: {reason}' for reason, leaves in names.items())
    caller_warnings.warn(
        f'{plan.algorithm} prunes no leaf of {len(plan)}. {reasons}. {_SEE_PLAN}. Give a sparsity above 0, such as '
        'sparsity=0.9, and a filter_fn that selects kernels; or take NoPruning() for training without pruning'
    )


def _some_of(names):
    return ', '.join(names[:3]) + (f' and {len(names) - 3} more' if len(names) > 3 else '')


@jax.jit
def keeps_any(mask: jax.Array) -> jax.Array:
    """Whether a mask keeps anything, in one program."""
    return jnp.any(mask != 0)


@jax.jit
def keeps_all(mask: jax.Array) -> jax.Array:
    """Whether a mask keeps everything, in one program."""
    return jnp.all(mask != 0)


def check_masks(pruner: Any, params: PyTree, masks: PyTree) -> None:
    """Warns where masks that were made once remove nothing; of masks that are being traced the plan tells.

    >>> import jaxpruner, jax.numpy as jnp
    >>> check_masks(jaxpruner.MagnitudePruning(), {'w': jnp.ones(2)}, {'w': jnp.array([1, 0], jnp.uint8)})
    """
    leaves = jax.tree.leaves(masks)
    is_traced = tree_lib.has_traced(leaves)
    if not is_traced and not all(map(keeps_all, leaves)):
        return
    plan = pruner.plan(params)
    if not plan.pruned:
        _warn_that_nothing_is_pruned(plan)
    elif not is_traced:
        caller_warnings.warn(
            f'{plan.algorithm} prunes nothing: its masks keep every weight, those of '
            f'{_some_of([leaf.name for leaf in plan.pruned])}, too, which it was to prune; look at its scores and its '
            'topk_fn'
        )


def warn_of_emptied(masks: PyTree, scores: PyTree) -> None:
    """Names the leaves that lose every weight because their scores are NaN throughout.

    >>> warn_of_emptied({'w': jnp.array([1, 0], jnp.uint8)}, {'w': jnp.array([2.0, jnp.nan])})
    """
    paths, leaves, treedef = selection.flatten_scores(scores)
    of_masks = tree_lib.leaves_like(treedef, masks)
    if tree_lib.has_traced(of_masks):
        return
    # All are computed before the first is waited for.
    kept = [None if mask is None or not mask.size else keeps_any(mask) for mask in of_masks]
    names = [
        tree_lib.path_string(path)
        for path, score, any_kept in zip(paths, leaves, kept, strict=True)
        if any_kept is not None and not any_kept and bool(jnp.isnan(selection.read(score)).all())
    ]
    if names:
        caller_warnings.warn(
            f'the scores of {_some_of(names)} are NaN alone: nothing is kept, and all becomes zero; look where NaN '
            'come from'
        )


# What hooks return.


def check_algorithm_state(pruner: Any, method: str, before: Any, after: Any) -> None:
    """Refuses a method that changes the structure, shapes or dtypes of `algorithm_state`.

    If a dtype changed, a loop in Python would compile the step a second time, `scan` would refuse it, and restoring a
    checkpoint into the shapes of `init` would cast it in silence. The check reads shapes alone, while a step is traced.
    """

    def form(state):
        paths, leaves, _ = tree_lib.flatten_with_paths({'algorithm_state': state})
        words = (f'{jnp.result_type(leaf)}{list(jnp.shape(leaf))}' for leaf in leaves)
        return dict(zip(map(tree_lib.path_string, paths), words, strict=True))

    old, new = form(before), form(after)
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            raise TypeError(
                f'{type(pruner).__name__}.{method} changes {name} from {old.get(name, "nothing")} to '
                f'{new.get(name, "nothing")}. Structure, shapes and dtypes must stay from step to step: make each leaf '
                'in init_algorithm_state as it is computed later, such as jnp.zeros_like(param, dtype=jnp.float32)'
            )


def check_tracked(pruner: Any, state: Any, returned: Any) -> tuple[Any, Any]:
    """Returns what `track` returned; refuses anything but a state and what it tracked."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], type(state)):
        raise TypeError(
            f'{type(pruner).__name__}.track must return two values, the SparseState and what update_state gets as '
            f'its argument tracked, got {type(returned).__name__}; write `return sparse_state._replace(…), None`'
        )
    check_algorithm_state(pruner, 'track', state.algorithm_state, returned[0].algorithm_state)
    return returned[0], returned[1]
