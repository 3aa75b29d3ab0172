"""Every check of a setting, and every warning, of the core.

Settings are checked when a pruner is made, shapes and targets in `init` and before pruning once. An error names the
value, the place and the remedy. What would run to the end and prune nothing, or too little, is warned of once.
"""

import dataclasses
import functools
import inspect
import itertools
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
from jaxpruner.plan import count_groups
from jaxpruner.sparse_state import SparseState
from jaxpruner.sparsity_types import Leaf, NByM, check_each, is_joint, normalize_setting
from jaxpruner.tree import PyTree, holds_weights

# Settings: the fields of pruners and the keys of configurations.


def _must_be(words, has_type, is_in_range=None):
    """Makes a check of a value by its type, and of a value of that type by its range."""

    def check(key, value):
        if not has_type(value):
            raise TypeError(f'{key} must be {words}, got {value!r}')
        if is_in_range and not tree_lib.is_traced(value) and not is_in_range(value):
            raise ValueError(f'{key} must be {words}, got {value!r}')

    return check


def _one_of(*words):
    return _must_be(' or '.join(map(repr, words)), _is_text, words.__contains__)


def _number(words, low, high=math.inf):
    is_in_range = lambda value: low <= float(value) <= high and math.isfinite(float(value))  # noqa: E731
    return _must_be(words, tree_lib.is_number, is_in_range)


def _is_text(value, depth=0):
    """Whether a value is text, or holds it in lists: a path is a list of names, a setting one of paths."""
    if depth and isinstance(value, list | tuple):
        return all(_is_text(entry, depth - 1) for entry in value)
    return isinstance(value, str)


def _is_whole(value):
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _are_stacks(value):
    if not isinstance(value, Mapping):
        return _is_text(value, depth=2)
    return all(_is_text(name, depth=1) and _is_whole(axis) for name, axis in value.items())


def _is_schedule(value):
    methods = ('is_mask_update_iter', 'get_sparsity_at_step')
    return not isinstance(value, type) and all(hasattr(value, name) for name in methods)


def _check_distribution(key, value):
    """Refuses what is no distribution, and wrong numbers in the usual one, which is a partial with keywords."""
    words = 'a function of the parameters, such as functools.partial(erk, sparsity=0.9)'
    _must_be(words, callable)(key, value)
    keywords = getattr(value, 'keywords', {})
    for name in ('sparsity', 'filter_fn', 'custom_sparsity_map'):
        if keywords.get(name) is not None:
            SETTINGS[name](name, keywords[name])


def _check_sparsity_type(key, value):
    try:
        normalize_setting(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f'{key}: {error}') from error


_FLAGS = (
    'skip_gradients is_sparse_gradients use_packed_masks is_packed is_debug '
    'use_normalization reset_optimizer reset_adam owl sequential keep_zeros'
)
_STEPS = (
    'update_start_step update_end_step init_dense_steps_end final_sparse_steps_start cycle_sparse_steps '
    'cycle_dense_steps'
)
_DECAY = 'optax.cosine_decay_schedule(0.3, last_step)'
_check_step = sparsity_schedules.checked_step
_check_sparsity = lambda key, value: sparsity_distributions.check_sparsity(value, key)  # noqa: E731

# Key -> (key, value) -> None, or an error that names both. First those that are alike.
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    key: check
    for keys, check in (
        (_FLAGS, _must_be('true or false', lambda value: isinstance(value, bool | np.bool_))),
        (_STEPS, _check_step),
        ('eps normalization_eps damping', _number('a finite number from 0 up', 0)),
        ('block_size rounds', _must_be('a whole number from 1 up', _is_whole, lambda n: n >= 1)),
        ('sparsity initial_sparsity', _check_sparsity),
        ('drop_fraction owl_deviation', _number('a number between 0 and 1', 0, 1)),
        ('filter_fn', _must_be('a function (path, leaf) -> bool', callable)),
        ('topk_fn', _must_be('a function (scores, sparsity) -> mask', callable)),
        ('drop_fraction_fn', _must_be(f'a function of the step, such as {_DECAY}', callable)),
    )
    for key in keys.split()
}
SETTINGS |= {
    # How much of each leaf.
    'dist_type': _one_of('uniform', 'erk'),
    'custom_sparsity_map': lambda key, value: sparsity_distributions.check_custom_map(value),
    'sparsity_distribution_fn': _check_distribution,
    # When.
    'update_freq': functools.partial(_check_step, minimum=1),
    'power': lambda key, value: sparsity_schedules.check_power(value, key),
    'scheduler': _must_be('a schedule, as those of sparsity_schedules are', _is_schedule),
    # Which weights together.
    'sparsity_type': _check_sparsity_type,
    'stacked': _must_be('a glob of leaves, a list of globs, or a mapping to axes', _are_stacks),
    'rng_seed': lambda key, value: seeds.check_seed(value),
    # Pruned once.
    'per': _one_of('output', 'layer'),
    'owl_per': _one_of('block', 'leaf'),
    'owl_multiple': _number('a finite number above 0', math.ulp(0.0)),
    'blocks': _must_be(
        'a list with a glob or a list of globs for each block',
        lambda value: not isinstance(value, str) and _is_text(value, depth=3),
    ),
}

DISTRIBUTION_KEYS = ('dist_type', 'sparsity', 'filter_fn', 'custom_sparsity_map')
# Field of a pruner -> keys of configurations that say the same.
SAID_BY = {
    'sparsity_distribution_fn': DISTRIBUTION_KEYS,
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


def check_targets(
    pruner: Any, distribution: Any, leaves: Sequence[Leaf], targets: Sequence[Any]
) -> list[Any]:
    """Checks the targets of leaves; returns them, `None` where nothing can be ranked, and for N:M its own share.

    Warns of targets that contradict N:M, whose share holds.

    Args:
      pruner: which is to prune the leaves.
      distribution: which made the targets.
      leaves: all leaves of the model.
      targets: of each leaf, `None` where it stays dense.

    Raises:
      ValueError: a sparsity outside [0, 1], or a leaf that the pruner cannot prune, because of its dtype, sparsity type
        or shape.
    """
    # Flags and random keys cannot be ranked.
    can_be_ranked = [
        leaf.sparsity_type is not None and jnp.issubdtype(leaf.dtype, jnp.number) for leaf in leaves
    ]
    checked = [own if can_be else None for own, can_be in zip(targets, can_be_ranked, strict=True)]
    custom = sparsity_distributions.custom_sparsities(
        getattr(distribution, 'keywords', {}).get('custom_sparsity_map'),
        [leaf.path for leaf in leaves],
    )
    if sparsity_distributions.filter_of(distribution) is sparsity_distributions.NOT_DIM_ONE_FILTER:
        is_selected = [own is not None and i not in custom for i, own in enumerate(checked)]
        _warn_of_vectors(leaves, is_selected)
    for sparsity_type, indices in mask_calculator.tied_leaves(leaves, can_be_ranked):
        shapes = {path: leaves[i].shape for path, i in indices.items()}
        tied = sparsity_type.targets_of(shapes, {path: checked[i] for path, i in indices.items()})
        for path, i in indices.items():
            checked[i] = tied[path]
    types_decide = mask_calculator.own_topk_fn(pruner.topk_fn) is None
    shape_checks, contradictions = {}, []
    for i, (leaf, target) in enumerate(zip(leaves, checked, strict=True)):
        if target is None:
            continue
        sparsity_distributions.check_sparsity(target, f'the sparsity of {leaf.name}')
        if pruner.needs_gradients and not holds_weights(leaf):
            raise ValueError(
                f'{leaf.name}: {type(pruner).__name__} scores weights by their gradients, and {leaf.dtype} has none; '
                f"leave it dense: sparsity_type={{'{leaf.name}': None, '*': …}}"
            )
        kind: Any = leaf.sparsity_type
        pruner.check_type(kind, f'{leaf.name}: ')
        if types_decide and not pruner.finds_input_axes:
            shape_checks[leaf.path] = leaf.check_shape
        if not types_decide or not isinstance(kind, NByM):
            continue
        share = (kind.m - kind.n) / kind.m
        is_given = i in custom or not isinstance(distribution, sparsity_distributions.NotGiven)
        if tree_lib.is_traced(target):
            checked[i] = jnp.where(target == 0, 0.0, share)
        elif not is_given or float(target) != 0:  # a given 0 keeps everything
            checked[i] = share
            if is_given and abs(float(target) - share) > _ROUNDING:
                words = f'{float(target):.4g}, where {kind.n}:{kind.m} removes {share:.4g}'
                contradictions.append(f'{leaf.name} ({words})')
    check_each(shape_checks)
    if contradictions:
        caller_warnings.warn(
            f'the sparsity of {_some_of(contradictions)} contradicts the sparsity type, whose share holds; leave the '
            'sparsity out, give that share, or choose another type'
        )
    return checked


def _warn_of_vectors(leaves, is_selected):
    """Warns once of leaves that the default filter takes for kernels, and that have the names of biases or norms.

    Either an axis counts layers that were stacked for a `scan`, and `stacked` does not say so, or a bias has axes of
    its own, as in attention.
    """
    vectors = []
    for leaf in itertools.compress(leaves, is_selected):
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
            f"leave them dense: sparsity_type={{'*/{vectors[0].path[-1]}': None, '*': …}}, or as filter_fn of uniform, "
            'erk, prune or a configuration sparsity_distributions.NOT_BIAS_FILTER. Any other filter_fn says that you '
            'have decided'
        )


# What prunes nothing, or too little.


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
        _warn_that_nothing_is_pruned(pruner, plan)
        return
    # Masks that are made once, or in each forward pass, need no update.
    if (pruner.starts_sparse and not pruner.regrows_from_zero) or not pruner.lands_on_zero:
        return
    steps = update_steps(pruner.scheduler)
    if steps is not None and not steps:
        schedule, once = 'PeriodicSchedule(update_freq)', ''
        if not pruner.starts_sparse:
            schedule = 'PolynomialSchedule(update_freq, update_start_step, update_end_step)'
            once = 'instant_sparsify to prune once without training, or '
        caller_warnings.warn(
            f'{plan.algorithm} never updates its masks, which stay as they are first made: {pruner.scheduler!r} has no '
            f'update step. Give a schedule that updates, such as {schedule} (in a configuration update_start_step, '
            f'too); or call {once}pruner.new_masks where your own loop decides. A class of your own whose first masks '
            'are sparse says so: starts_sparse = True'
        )
    # Of N:M any sparsity above 0 means N of M.
    elif not pruner.starts_sparse and share_at_end(pruner.scheduler) < 0.999:
        has_own_ranking = mask_calculator.own_topk_fn(pruner.topk_fn) is not None
        if has_own_ranking or not all(isinstance(leaf.sparsity_type, NByM) for leaf in plan.pruned):
            warn_of_shortfall(plan.algorithm, pruner.scheduler)


def check_replaced(plan: Any, schedule: Any, drop_fraction_fn: Callable[[int], Any]) -> None:
    """Warns where the share to replace is less than one weight (or block, channel) of every leaf."""
    steps = update_steps(schedule) or (0,)
    with jax.ensure_compile_time_eval():  # a share that grows, decays, or does both, is large there
        shares = [drop_fraction_fn(steps[i]) for i in (0, len(steps) // 2, -1)]
    kept = [count_groups(each, each.target)[1] for each in plan.pruned if each.target is not None]
    share = 1.0 if tree_lib.has_traced(shares) else max(map(float, shares))
    if kept and max(kept) * share <= 0.5:
        caller_warnings.warn(
            f'{plan.algorithm} never replaces a weight: no leaf keeps more than {max(kept)}, of which a share of '
            f'{share:.4g} is less than one; give a larger drop fraction, or take StaticRandomSparse'
        )


def check_masks(pruner: Any, params: PyTree, masks: PyTree, scores: PyTree = None) -> None:
    """Warns where masks that were made once remove nothing, or all of a leaf, whose scores are NaN alone.

    Of masks that are being traced the plan tells.

    >>> import jaxpruner, jax.numpy as jnp
    >>> check_masks(jaxpruner.MagnitudePruning(), {'w': jnp.ones(2)}, {'w': jnp.array([1, 0], jnp.uint8)})
    """
    is_traced = tree_lib.has_traced(masks)
    if is_traced or all(map(jnp.all, jax.tree.leaves(masks))):
        plan = pruner.plan(params)
        if not plan.pruned:
            _warn_that_nothing_is_pruned(pruner, plan)
        elif not is_traced:
            caller_warnings.warn(
                f'{plan.algorithm} prunes nothing: its masks keep every weight, those of '
                f'{_some_of([leaf.name for leaf in plan.pruned])}, too, which it was to prune; look at its scores and '
                'its topk_fn'
            )
        return
    if scores is None:
        return
    paths, of_leaves, treedef = selection.flatten_scores(scores)
    names = [
        tree_lib.path_string(path)
        for path, own, mask in zip(
            paths, of_leaves, tree_lib.leaves_like(treedef, masks), strict=True
        )
        if mask is not None
        and mask.size
        and not mask.any()
        and jnp.isnan(selection.read(own)).all()
    ]
    if names:
        caller_warnings.warn(
            f'the scores of {_some_of(names)} are NaN alone: nothing is kept, and all becomes zero; look where NaN '
            'come from'
        )


def _warn_that_nothing_is_pruned(pruner, plan):
    if not pruner.prunes:
        return
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
        f'{plan.algorithm} prunes no leaf of {len(plan)}. {reasons}. print(pruner.plan(params)) shows each leaf. Give '
        'a sparsity above 0, such as sparsity=0.9, and a filter_fn that selects kernels; or take NoPruning() for '
        'training without pruning'
    )


def _some_of(names):
    return ', '.join(names[:3]) + (f' and {len(names) - 3} more' if len(names) > 3 else '')


# What hooks return.


def check_scored(pruner: Any, method: str, params: PyTree, scores: PyTree) -> None:
    """Refuses scores that are no tree like the parameters, or have other shapes; `None` scores no weight of a leaf."""
    hook = f'{type(pruner).__name__}.{method}'
    try:
        for path, leaf, own in tree_lib.zip_with_paths(params, scores):
            if own is not None and jnp.shape(own) != leaf.shape:
                raise ValueError(
                    f'{tree_lib.path_string(path)} has shape {leaf.shape}, and its scores {jnp.shape(own)}; '
                    'give each weight a score, or the leaf None'
                )
    except ValueError as error:
        raise ValueError(f'{hook}: {error}') from error


def check_algorithm_state(pruner: Any, method: str, before: Any, after: Any) -> None:
    """Refuses a method that returns no state, or changes structure, shapes or dtypes of its `algorithm_state`.

    If a dtype changed, a loop in Python would compile the step a second time, `scan` would refuse it, and restoring a
    checkpoint into the shapes of `init` would cast it in silence. The check reads shapes alone, while a step is traced.
    """
    hook = f'{type(pruner).__name__}.{method}'
    if not isinstance(after, SparseState):
        raise TypeError(
            f'{hook} must return a SparseState, got {type(after).__name__}; write `return sparse_state._replace(…)`'
        )
    if after.algorithm_state is before.algorithm_state:
        return
    forms = []
    for state in (before, after):
        paths, leaves, _ = tree_lib.flatten_with_paths({'algorithm_state': state.algorithm_state})
        words = (f'{jnp.result_type(leaf)}{list(jnp.shape(leaf))}' for leaf in leaves)
        forms.append(dict(zip(map(tree_lib.path_string, paths), words, strict=True)))
    for name in sorted(forms[0] | forms[1]):
        old, new = (form.get(name, 'nothing') for form in forms)
        if old != new:
            raise TypeError(
                f'{hook} changes {name} from {old} to {new}. Structure, shapes and dtypes '
                'must stay from step to step: make each leaf in init_algorithm_state as it is computed later, such as '
                'jnp.zeros_like(param, dtype=jnp.float32)'
            )
