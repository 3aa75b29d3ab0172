"""Which sparsity each leaf is to reach, checked before anything is computed."""

import contextlib
import contextvars
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_distributions
from jaxpruner import tree as tree_lib
from jaxpruner.core import arguments, caller_warnings, sparse_state
from jaxpruner.mask_calculator import joint_leaves
from jaxpruner.sparsity_types import Leaf, NByM, is_joint

logger = logging.getLogger(__name__)

# Targets are held in float32.
_TARGET_ROUNDING = 1e-6
# A sparsity that is a rounded share of N:M, such as 0.33 for 2:3, does not contradict it.
_ROUNDING = 0.005


class Contradiction(NamedTuple):
    """A leaf of N:M, and the sparsity that it was given, which is not the share of its type."""

    leaf: Leaf
    sparsity: float


# Where contradictions go that are not warned of.
_COLLECTED: contextvars.ContextVar[list[Contradiction] | None] = contextvars.ContextVar(
    'collected', default=None
)


def check_distribution(function: Any) -> None:
    """Refuses what is no distribution, and wrong numbers in the usual one, which is a partial with keywords.

    Raises:
      TypeError, ValueError: it is no function, or its sparsity lies outside [0, 1].
    """
    arguments.check_callable('sparsity_distribution_fn', function)
    keywords = getattr(function, 'keywords', {})
    if 'sparsity' in keywords:
        sparsity_distributions.check_sparsity(keywords['sparsity'], 'sparsity')
    arguments.check_callable('filter_fn', keywords.get('filter_fn'))
    sparsity_distributions.check_custom_map(keywords.get('custom_sparsity_map'))


def of_leaves(
    distribution: Callable[..., tree_lib.PyTree] | None,
    params: tree_lib.PyTree,
    leaves: Sequence[Leaf],
    stacked: tree_lib.Stacked,
    check: Callable[[Sequence[Leaf]], None],
    types_decide: bool = True,
) -> tree_lib.PyTree:
    """Gives each leaf its target; returns a tree like the parameters, `None` where dense.

    Args:
      distribution: from parameters (and the names of stacked leaves, if it takes them) to sparsities; `None` for none.
      params: the parameters, or their shapes.
      leaves: the same, leaf by leaf; their own targets are not read.
      stacked: which leaves are stacks of layers.
      check: refuses sparsity types of the leaves that are to be pruned.
      types_decide: the type N:M decides the target of its leaves, by what the user gave them:
        a sparsity other than 0 -> the share that N:M removes, with a warning if the two differ;
        a sparsity of 0 -> dense, with a mask of ones;
        no sparsity at all, also where others are named in a custom map -> the share that N:M removes.

    Raises:
      TypeError: a leaf is no array.
      ValueError: a sparsity outside [0, 1], or a name without a leaf.
    """
    params = tree_lib.as_arrays(params)
    paths, arrays, treedef = tree_lib.flatten_with_paths(params)
    if distribution is None:
        return tree_lib.unflatten(treedef, [None] * len(leaves), arrays)
    stacked_argument = _check_stacked(distribution, stacked, paths)
    decided = []  # whatever a filter selects
    for leaf in leaves:
        if leaf.sparsity_type is None or is_joint(leaf.sparsity_type):
            decided.append(leaf.path)
    with sparsity_distributions.no_warnings_about(decided):
        targets = tree_lib.leaves_like(treedef, distribution(params, **stacked_argument))
    can_be_ranked = [_can_be_ranked(leaf, arrays[i]) for i, leaf in enumerate(leaves)]
    for i, is_ranked in enumerate(can_be_ranked):
        if not is_ranked:
            targets[i] = None
    targets = joint_leaves.with_targets(leaves, targets, can_be_ranked)
    pruned = []
    for i, leaf in enumerate(leaves):
        if targets[i] is not None:
            sparsity_distributions.check_sparsity(targets[i], f'the sparsity of {leaf.name}')
            pruned.append(leaf)
    check(pruned)
    if types_decide:
        targets = _with_shares_of_n_by_m(targets, leaves, _are_given(distribution, paths))
    return tree_lib.unflatten(treedef, targets, arrays)


def retargeted(pruner: Any, opt_state: Any, params: tree_lib.PyTree) -> Any:
    """Gives a state the targets of a pruner; see `BaseUpdater.retarget`."""
    state = sparse_state.only_sparse_state(opt_state)
    paths, _, treedef = tree_lib.flatten_with_paths(params)
    wanted = tree_lib.leaves_like(treedef, pruner.get_target_sparsities(params))
    masks = tree_lib.leaves_like(treedef, state.masks)
    for path, target, mask in zip(paths, wanted, masks, strict=True):
        if (target is None) != (mask is None):
            raise ValueError(
                f'{tree_lib.path_string(path)} has {"no" if mask is None else "a"} mask in the state, and '
                f'{"a" if mask is None else "no"} target by this pruner: retarget changes numbers alone; make a new '
                'state with the init of the wrapped optimizer'
            )
    if pruner.keeps_count and _differences(pruner, state, params):
        raise ValueError(
            f'{type(pruner).__name__} keeps as many weights as its first masks do, whatever the targets; make a new '
            'state with the init of the wrapped optimizer'
        )
    new = [jnp.asarray(target, jnp.float32) for target in wanted if target is not None]
    (raw,) = sparse_state.outermost_states(opt_state)
    old, old_treedef = jax.tree.flatten(raw.target_sparsities)
    if jnp.shape(getattr(old[0], 'value', old[0]) if old else 0.0) != ():
        raise ValueError('the state holds several trainings: call jax.vmap(pruner.retarget)')
    if len(old) == 1:  # of one leaf, or of all leaves ranked together
        if not tree_lib.has_traced(new) and len(set(map(float, new))) > 1:
            raise ValueError(
                'the state has one target for all leaves, and this pruner several; make a new state with the init of '
                'the wrapped optimizer'
            )
        new = new[:1]
    boxed = []
    for box, target in zip(old, new, strict=True):
        # Older versions of Flax NNX keep arrays in variables that are leaves.
        boxed.append(box.replace(target) if hasattr(box, 'value') else target)
    return sparse_state.with_state(
        opt_state, raw._replace(target_sparsities=old_treedef.unflatten(boxed))
    )


def warn_of_other_targets(pruner: Any, state: Any, params: tree_lib.PyTree) -> None:
    """Warns where the targets of a state are not those of the pruner that goes on with it; silent on traced values."""
    differences = _differences(pruner, state, params)
    if differences:
        name, held, wanted = differences[0]
        remedy = 'state = pruner.retarget(state, params) replaces it'
        if pruner.keeps_count:  # as many weights as its first masks do
            remedy = 'make a new state with the init of the wrapped optimizer'
        more = f' (and those of {len(differences) - 1} more leaves)' if differences[1:] else ''
        caller_warnings.warn(
            f'{name}: the target in the state is {held:.4g}{more}, and that of {type(pruner).__name__} {wanted:.4g}. '
            f'The one in the state holds; {remedy}'
        )


def _differences(
    pruner: Any, state: sparse_state.SparseState, params: tree_lib.PyTree
) -> list[tuple[str, float, float]]:
    """Lists the leaves whose targets differ: name, target in the state, target of the pruner."""
    paths, _, treedef = tree_lib.flatten_with_paths(params)
    with warnings.catch_warnings(
        action='ignore'
    ):  # which stood when the state or the plan was made
        wanted = tree_lib.leaves_like(treedef, pruner.get_target_sparsities(params))
    held = tree_lib.leaves_like(treedef, sparse_state.leaf_targets(state))
    differences = []
    for path, old, new in zip(paths, held, wanted, strict=True):
        if old is None or new is None or tree_lib.has_traced((old, new)) or jnp.shape(old):
            continue
        if abs(float(old) - float(new)) > _TARGET_ROUNDING:
            differences.append((tree_lib.path_string(path), float(old), float(new)))
    return differences


def log_targets(sparsities: tree_lib.PyTree) -> None:
    """Logs the target of each leaf, as a number where its value can be read."""
    if logger.isEnabledFor(logging.INFO):  # reading arrays waits for the device
        logger.info('target_sparsities: %s', jax.tree.map(_as_number, sparsities))


def _as_number(sparsity: Any) -> Any:
    is_readable = getattr(sparsity, 'is_fully_addressable', True)
    if tree_lib.is_traced(sparsity) or not is_readable:
        return sparsity
    return float(sparsity)


@contextlib.contextmanager
def collect_contradictions() -> Iterator[list[Contradiction]]:
    """Collects contradictions inside, of which there is no warning: it is not known yet which leaves are pruned."""
    collected: list[Contradiction] = []
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


def warn_of_contradictions(contradictions: Sequence[Contradiction]) -> None:
    """Warns once if there are any, and names the first leaf."""
    if not contradictions:
        return
    leaf, sparsity = contradictions[0]
    assert isinstance(leaf.sparsity_type, NByM)
    pattern = f'{leaf.sparsity_type.n}:{leaf.sparsity_type.m}'
    share = _removed_share(leaf.sparsity_type)
    number = len(contradictions)
    others = f' (and {number - 1} more leaves)' if number > 1 else ''
    caller_warnings.warn(
        f'{leaf.name}{others}: sparsity {sparsity:.4g} contradicts the sparsity type {pattern}, '
        f'which removes {share:.4g}; the share of {pattern} holds. Leave the sparsity out, give '
        f'{share:.4g}, or choose another type'
    )


def _check_stacked(
    distribution: Callable[..., Any], stacked: tree_lib.Stacked, paths: Sequence[tree_lib.Path]
) -> dict[str, Any]:
    """Returns the argument that tells a distribution of stacked leaves, if there are any."""
    names = tree_lib.as_names(stacked)
    tree_lib.check_names(names, paths, 'stacked')
    given = stacked if isinstance(stacked, Mapping) else names
    argument = {'stacked': given} if names else {}
    if arguments.known_arguments(distribution, argument) != argument:
        raise ValueError(
            'stacked layers change what a distribution selects, and this sparsity_distribution_fn takes no '
            'argument `stacked`; pass functools.partial(uniform, sparsity=…), or a function of params and stacked'
        )
    return argument


def _can_be_ranked(leaf: Leaf, array: Any) -> bool:
    """Whether a leaf holds numbers and has a type; flags and random keys cannot be ranked."""
    if leaf.sparsity_type is None:
        return False
    dtype = getattr(array, 'dtype', None)
    if dtype is None:
        raise TypeError(
            f'{leaf.name}: {array!r} is no array; give arrays alone, for example '
            'equinox.filter(model, equinox.is_array)'
        )
    return jnp.issubdtype(dtype, jnp.number)


def _are_given(distribution: Any, paths: Sequence[tree_lib.Path]) -> list[bool]:
    """Tells for each leaf whether a user gave its target."""
    if not isinstance(distribution, sparsity_distributions.NotGiven):
        return [True] * len(paths)
    named = sparsity_distributions.check_custom_map(
        distribution.keywords.get('custom_sparsity_map')
    )
    rules = tree_lib.first_matches(named, paths, 'custom_sparsity_map')
    return [rule is not None for rule in rules]


def _with_shares_of_n_by_m(
    targets: Sequence[Any], leaves: Sequence[Leaf], are_given: Sequence[bool]
) -> list[Any]:
    """Sets the target of each leaf of N:M to its share; a target of 0 keeps it dense if a user gave it."""
    reached, contradictions = list(targets), []
    for i, leaf in enumerate(leaves):
        target, sparsity_type = targets[i], leaf.sparsity_type
        if target is None or not isinstance(sparsity_type, NByM):
            continue
        share = _removed_share(sparsity_type)
        if tree_lib.is_traced(target):
            reached[i] = jnp.where(target == 0, 0.0, share)
        elif float(target) != 0 or not are_given[i]:
            reached[i] = share
            if are_given[i] and abs(float(target) - share) > _ROUNDING:
                contradictions.append(Contradiction(leaf, float(target)))
    collected = _COLLECTED.get()
    if collected is None:
        warn_of_contradictions(contradictions)
    else:
        collected += contradictions
    return reached


def _removed_share(sparsity_type: NByM) -> float:
    return (sparsity_type.m - sparsity_type.n) / sparsity_type.m
