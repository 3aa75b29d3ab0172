"""The tables that the contract crosses: a new algorithm, optimizer, front-end or sparsity type is one row."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from contract.cover import all_pairs, each_once
from contract.expected import MASK_CHECKS
from contract.front_ends import FRONT_ENDS, HIDDEN, INPUTS
from jaxpruner import BaseUpdater

# The sparsity type of an algorithm that prunes nothing.
DENSE = 'dense'

_NO_SECOND_MOMENT = 'adam'
_ACROSS_LEAVES = 'Unstructured'
_NOT_IN_GROUPS = 'N:M'
_NEEDS_GROUPS = 'NByM'
_NOT_RESETTABLE = 'lbfgs'


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How an algorithm differs from the common contract.

    Attributes:
      refuses: optimizer or sparsity type -> words of the reason that it gives.
      starts_sparse: its first masks prune, so that it wants one `post_gradient_update` after `init`.
      regrows: regrown weights start at zero, so that a kept weight may be zero, too.
      straight_through: zeros are in `pre_forward_update` alone.
      joint: the number of weights is counted over all leaves.
    """

    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    starts_sparse: bool = False
    regrows: bool = False
    straight_through: bool = False
    joint: bool = False


def _all_but(kept: str, reason: str) -> dict[str, str]:
    """Every sparsity type whose name does not begin so is refused."""
    return {name: reason for name in MASK_CHECKS if not name.startswith(kept)}


N_BY_M = {'2:4': _NOT_IN_GROUPS, 'nm_1,4,0': _NOT_IN_GROUPS}
_NO_NU = dict.fromkeys(('sgd_momentum', 'adafactor', 'lion', 'muon', 'lbfgs'), _NO_SECOND_MOMENT)
_LBFGS = {'lbfgs': _NOT_RESETTABLE}
_SPARSE_TRAINER = Algorithm(refuses=N_BY_M | _LBFGS, starts_sparse=True, regrows=True)
_GLOBAL = Algorithm(refuses=_all_but('unstructured', _ACROSS_LEAVES), joint=True)
_GRADUAL = Algorithm()
_STRAIGHT_THROUGH = Algorithm(straight_through=True)

ALGORITHMS: dict[str, Algorithm] = {
    'no_prune': Algorithm(),
    'magnitude': _GRADUAL,
    'random': _GRADUAL,
    'saliency': _GRADUAL,
    'magnitude_ste': _STRAIGHT_THROUGH,
    'random_ste': _STRAIGHT_THROUGH,
    'global_magnitude': _GLOBAL,
    'global_saliency': _GLOBAL,
    'static_sparse': Algorithm(starts_sparse=True),
    'set': _SPARSE_TRAINER,
    'rigl': _SPARSE_TRAINER,
    'acdc': Algorithm(refuses=_LBFGS),  # the schedules below end in its last sparse phase
    'adam_fisher': Algorithm(refuses=_NO_NU),
    'iterative_nm': Algorithm(refuses={n: _NEEDS_GROUPS for n in MASK_CHECKS if n not in N_BY_M}),
    'movement': _STRAIGHT_THROUGH,
}


def is_kernel(leaf: Any) -> bool:
    return leaf.ndim > 1


def is_first_kernel(leaf: Any) -> bool:
    return leaf.size == INPUTS * HIDDEN


def where(selects: Callable[[Any], bool], value: bool = True) -> Callable[[Any], Any]:
    """A mask for `optax.masked`: the leaves that are selected, or those that are not."""
    return functools.partial(jax.tree.map, lambda leaf: selects(leaf) == value)


def _labels(selects: Callable[[Any], bool]) -> Callable[[Any], Any]:
    return functools.partial(jax.tree.map, lambda leaf: 'chosen' if selects(leaf) else 'other')


_EARLY = {'update_freq': 2, 'update_start_step': 2, 'update_end_step': 8}
# MultiSteps around the pruner shows it every second step only; AC/DC ends sparse here, too.
_HALVED = {'update_freq': 1, 'update_start_step': 1, 'update_end_step': 4}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How an optimizer trains with a pruner somewhere in it.

    Attributes:
      wrap: updater -> the whole transformation.
      schedule: when masks are updated; the last update lies before the last step.
      prunes: which leaves the pruner sparsifies, given what it sees of them.
    """

    wrap: Callable[[BaseUpdater], optax.GradientTransformation]
    schedule: Mapping[str, int] = dataclasses.field(default_factory=lambda: _EARLY)
    prunes: Callable[[Any], bool] = is_kernel


def _inside(inner: optax.GradientTransformation) -> Optimizer:
    return Optimizer(lambda updater: updater.wrap_optax(inner))


def _masked_outside(updater: BaseUpdater) -> optax.GradientTransformation:
    return optax.chain(
        optax.masked(updater.wrap_optax(optax.adam(1e-2)), where(is_first_kernel)),
        optax.masked(optax.sgd(1e-2), where(is_first_kernel, False)),
    )


def _multi_transform_outside(updater: BaseUpdater) -> optax.GradientTransformation:
    rules = {'chosen': updater.wrap_optax(optax.adam(1e-2)), 'other': optax.sgd(1e-2)}
    return optax.multi_transform(rules, _labels(is_first_kernel))


def _multi_steps(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.MultiSteps(inner, every_k_schedule=2).gradient_transformation()


OPTIMIZERS: dict[str, Optimizer] = {
    'sgd_momentum': _inside(optax.sgd(1e-2, momentum=0.9)),
    'adam': _inside(optax.adam(1e-2)),
    'adamw': _inside(optax.adamw(1e-2, weight_decay=0.1)),
    # From 8 on, so that the first kernel's moments are factored and the second's are not.
    'adafactor': _inside(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    'lion': _inside(optax.lion(1e-3)),
    'rmsprop': _inside(optax.rmsprop(1e-2, momentum=0.9)),
    'muon': _inside(optax.contrib.muon(1e-2)),
    # Without its line search, which needs the loss; clipped, since it takes noisy gradients for curvature.
    'lbfgs': _inside(
        optax.chain(optax.scale_by_lbfgs(3), optax.clip_by_global_norm(1.0), optax.scale(-1e-2))
    ),
    'chain_clip': _inside(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))),
    'multi_steps_inside': _inside(_multi_steps(optax.adam(1e-2))),
    'multi_steps_outside': Optimizer(
        lambda u: _multi_steps(u.wrap_optax(optax.adam(1e-2))), _HALVED
    ),
    'inject_hyperparams': _inside(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 12))
    ),
    'masked_inside': _inside(
        optax.chain(optax.masked(optax.scale_by_adam(), where(is_kernel)), optax.scale(-1e-2))
    ),
    'masked_outside': Optimizer(_masked_outside, prunes=is_first_kernel),
    'multi_transform_inside': _inside(
        optax.multi_transform(
            {'chosen': optax.adam(1e-2), 'other': optax.sgd(1e-2)}, _labels(is_kernel)
        )
    ),
    'multi_transform_outside': Optimizer(_multi_transform_outside, prunes=is_first_kernel),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination; its id names all six values."""

    algorithm: str
    packed: bool
    optimizer: str
    front_end: str
    sparsity_type: str
    distribution: str

    def __str__(self) -> str:
        return '-'.join(
            'packed' if v is True else 'bytes' if v is False else v
            for v in dataclasses.astuple(self)
        )


DIMENSIONS: dict[str, list[Any]] = {
    'algorithm': list(ALGORITHMS),
    'packed': [True, False],
    'optimizer': list(OPTIMIZERS),
    'front_end': list(FRONT_ENDS),
    'sparsity_type': [*MASK_CHECKS, DENSE],
    'distribution': ['uniform', 'erk'],
}


def is_allowed(combination: Mapping[str, Any]) -> bool:
    """Whether the algorithm takes what else has been chosen; a combination may be incomplete."""
    sparsity_type = combination.get('sparsity_type')
    if 'algorithm' not in combination:
        return True
    name = combination['algorithm']
    if sparsity_type is not None and (sparsity_type == DENSE) != (name == 'no_prune'):
        return False
    return not any(value in ALGORITHMS[name].refuses for value in combination.values())


COVER = [Case(**combination) for combination in all_pairs(DIMENSIONS, is_allowed)]
# Those in which a value of some dimension occurs for the first time, so that each value occurs in one.
QUICK = each_once(COVER, lambda case: set(dataclasses.asdict(case).items()))
