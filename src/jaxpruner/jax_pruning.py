"""JAX-Pruning's interface: strategies that say what is pruned at which epoch, and the functions that carry them out.

An entry of a strategy, resolved for given parameters, is one of the core's magnitude pruners and a sparsity for each
leaf that it means. `pruning` lets it make masks in a loop over epochs, `StrategyPruning` in an optimizer.
"""

import dataclasses
import fnmatch
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import (
    algorithms,
    base_updater,
    caller_warnings,
    checks,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
)
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.files import input_files
from jaxpruner.plan import PruningPlan
from jaxpruner.sparsity_types import NByM

# Strategies: read once from what users write.

_METHODS = (
    'unstr_global unstr_unified_local unstr_local str_global str_unified_local str_local'.split()
)
# A density, the share kept, for unstructured methods; n of m for structured ones.
_Rate = float | NByM
_KEYS = ('method', 'prune_rate_pattern', 'prune_axis')
_FORM = '{"method": …, "prune_rate_pattern": …}, if need be with "prune_axis"'


@dataclasses.dataclass(frozen=True)
class PruningEntry:
    """What is pruned at one epoch.

    Attributes:
      epoch: the epoch after whose last step new masks are made.
      method: `'unstr_…'` or `'str_…'` followed by `'global'`, `'unified_local'` or `'local'`.
      rates: one rate for all kernels (a density, or N:M), or pairs of a layer's name and its rate (`None`: left as it
        is). The first pair that matches wins.
      prune_axis: the axis along which N:M groups lie; `None` for the last.

    Raises:
      ValueError, TypeError: a value is wrong; the message names the entry.

    >>> PruningEntry(1, 'unstr_global', 0.9).is_global
    True
    """

    epoch: int
    method: str
    rates: _Rate | tuple[tuple[Any, _Rate | None], ...]
    prune_axis: int | None = None

    def __post_init__(self):
        object.__setattr__(self, 'epoch', _parse_epoch(self.epoch))
        if self.method not in _METHODS:
            nearest = tree_lib.nearest(str(self.method), _METHODS)
            raise ValueError(f'{self.where}: method {self.method!r} is unknown; {nearest}')
        if self.prune_axis is not None and not self.method.startswith('str_'):
            raise ValueError(
                f'{self.where}: prune_axis has no meaning for {self.method!r}; leave it out, or use str_…'
            )
        rates: Any = self.rates
        if isinstance(rates, Mapping):
            rates = tuple(rates.items())
        # A pair of numbers is N:M.
        if not isinstance(rates, tuple) or not all(isinstance(pair, tuple) for pair in rates):
            rates = self._parse_rate('prune_rate_pattern', rates)
        elif self.is_global:
            raise ValueError(
                f'{self.where}: unstr_global ranks all layers together, so it takes one density; to give layers '
                "densities of their own use method='unstr_local'"
            )
        else:
            names = [tree_lib.rule_name(name, f'{self.where}: ') for name, _ in rates]
            parsed = [self._parse_rate(repr(name), rate) for name, rate in rates]
            if all(rate is None for rate in parsed):
                raise ValueError(f'{self.where}: prune_rate_pattern gives no layer a rate')
            rates = tuple(zip(names, parsed, strict=True))
        object.__setattr__(self, 'rates', rates)

    def _parse_rate(self, name: str, rate: Any) -> Any:
        where = f'{self.where}: {name}'
        if rate in (None, 'dense') and name != 'prune_rate_pattern':
            return None
        if self.method.startswith('unstr_'):
            sparsity_distributions.check_density(rate, where)
            return float(rate)  # pyright: ignore[reportArgumentType]
        try:
            return sparsity_types.parse_n_by_m(rate, self.prune_axis)
        except (ValueError, TypeError) as error:
            raise type(error)(f'{where}: {error}') from error

    @property
    def where(self) -> str:
        """How messages call the entry."""
        return f'prune_strategy[{self.epoch}]'

    @property
    def is_global(self) -> bool:
        """Whether one ranking covers all layers; N:M is the same everywhere, so `str_global` has none."""
        return self.method == 'unstr_global'


@dataclasses.dataclass(frozen=True)
class PruningStrategy:
    """Which epochs prune what; hashable, so that it may be a static argument of `jit`.

    Attributes:
      entries: one entry an epoch, in their order.

    >>> strategy = PruningStrategy.parse({10: {'method': 'str_unified_local', 'prune_rate_pattern': '2:4'}})
    >>> strategy.epochs
    (10,)
    """

    entries: tuple[PruningEntry, ...]

    @classmethod
    def parse(cls, setting: Any) -> 'PruningStrategy':
        """Reads a strategy.

        Args:
          setting: `{epoch: {'method': …, 'prune_rate_pattern': …, 'prune_axis': …}}` (epochs may be text; the axis is
            optional; a layer's rate may be `'dense'`, as files know no `None`), the path of a TOML or JSON file with
            such a table, or a strategy, which is returned as it is.

        Returns:
          The validated strategy.

        Raises:
          ValueError, TypeError: a value is wrong; the message names the entry and what would be right.
          FileNotFoundError: there is no such file.

        >>> PruningStrategy.parse({'1': {'method': 'unstr_global', 'prune_rate_pattern': 0.9}}).entries
        (PruningEntry(epoch=1, method='unstr_global', rates=0.9, prune_axis=None),)
        """
        if isinstance(setting, cls):
            return setting
        if isinstance(setting, str | os.PathLike):
            content = input_files.read_config(setting)
            try:
                return cls.parse(content)
            except (ValueError, TypeError) as error:
                raise type(error)(f'{os.fspath(setting)}: {error}') from error
        if not isinstance(setting, Mapping):
            raise TypeError(
                f'prune_strategy must be {{epoch: {_FORM}}}, a PruningStrategy, or the path of a TOML or JSON file; '
                f'got {setting!r}'
            )
        entries = {}
        for key, entry in setting.items():
            epoch = _parse_epoch(key)
            where = f'prune_strategy[{epoch}]'
            if not isinstance(entry, Mapping):
                raise TypeError(f'{where} must be {_FORM}, got {entry!r}')
            if not {'method', 'prune_rate_pattern'} <= set(entry) <= set(_KEYS):
                raise ValueError(f'{where} has the keys {list(entry)}; write {_FORM}')
            if epoch in entries:
                raise ValueError(f'{where} is there twice; put both into one')
            method, rates = entry['method'], entry['prune_rate_pattern']
            entries[epoch] = PruningEntry(epoch, method, rates, entry.get('prune_axis'))
        return cls(tuple(entries[epoch] for epoch in sorted(entries)))

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs that prune, ascending."""
        return tuple(entry.epoch for entry in self.entries)


def gradual_strategy(
    epochs: Iterable[int], final: Any, method: str | None = None, power: float = 1
) -> PruningStrategy:
    r"""A strategy that approaches a density, or an N:M pattern, over some epochs.

    At the i-th of n epochs a share $1 - (1 - i/n)^{power}$ of what is to be removed has been removed; with N:M a
    rounded number of the weights in each group.

    Args:
      epochs: the epochs that prune, ascending; of one epoch the rate is `final`.
      final: the last density in (0, 1], or the last pattern, `(n, m)` or `'n:m'`.
      method: `'unstr_unified_local'` for a density and `'str_unified_local'` for a pattern unless given.
      power: 1 removes as much at each epoch, 3 most at first (Zhu and Gupta, "To prune, or not to prune", 2017).

    Returns:
      The strategy.

    Raises:
      ValueError, TypeError: a value is wrong.

    >>> [entry.rates for entry in gradual_strategy(range(10, 100, 10), 0.1).entries]
    [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    >>> gradual_strategy([50], (2, 4)).entries[0].method
    'str_unified_local'
    """
    numbers = list(map(_parse_epoch, epochs))
    if not numbers or numbers != sorted(set(numbers)):
        raise ValueError(f'epochs must be ascending whole numbers, at least one, got {numbers}')
    sparsity_schedules.check_power(power, 'power')
    prefix = 'str' if isinstance(final, str | list | tuple | NByM) else 'unstr'
    rates: Any = final
    last = PruningEntry(numbers[-1], method or f'{prefix}_unified_local', rates)
    entries = []
    for i, epoch in enumerate(numbers[:-1], 1):
        removed = 1 - (1 - i / len(numbers)) ** power
        rate: Any = last.rates
        if isinstance(rate, NByM):
            rate = dataclasses.replace(rate, n=rate.m - round((rate.m - rate.n) * removed))
        else:
            rate = round(1 - (1 - rate) * removed, 12)  # 0.3, where floats give 0.30000000000000004
        entries.append(PruningEntry(epoch, last.method, rate))
    return PruningStrategy((*entries, last))


def _parse_epoch(epoch: Any) -> int:
    is_text = isinstance(epoch, str) and epoch.strip().isdecimal()
    return sparsity_schedules.checked_step('an epoch', int(epoch) if is_text else epoch)


# What an entry means for given parameters.

# `kernel` in Flax and Keras, `weight` in Equinox, `w` in Haiku; also w1, w_in, weight_hh, depthwise_kernel.
_KERNEL = re.compile(r'(?:.*_)?(?:kernel|weights?|w)(?:\d+|_(?:\d+|in|out|ih|hh))?')
# Layers whose `weight` is no kernel, as Equinox has them.
_OTHER_LAYER = re.compile(r'.*norm.*|.*embed.*|(?:.*_)?(?:ln|emb|wte|wpe)(?:\d+|_.*)?')


def _is_kernel(path: tree_lib.Path, shape: tuple[int, ...]) -> bool:
    """Whether a leaf is a kernel: at least two dimensions and a kernel's name.

    Entries of lists and tuples have no name of their own: they are kernels, unless the list has the name of something
    else.
    """
    layer, name = ['', '', *(part.lower() for part in path if not part.isdecimal())][-2:]
    if len(shape) < 2:
        return False
    if not _KERNEL.fullmatch(name):
        is_other = name in ('b', 'bias', 'scale') or _OTHER_LAYER.fullmatch(name)
        return path[-1].isdecimal() and not is_other
    embeds_patches = 'embed' in layer and len(shape) > 2
    return not name.startswith('weight') or not _OTHER_LAYER.fullmatch(layer) or embeds_patches


def _names_leaf(name: str | tree_lib.Path, path: tree_lib.Path) -> bool:
    """Whether a name means a leaf: `'Dense_0-kernel'`, its layer `'Dense_0'`, a glob, or as the core names it."""
    if tree_lib.matches(name, path):
        return True
    layers = list(itertools.accumulate(path, '{}-{}'.format))
    return isinstance(name, str) and (name in layers or fnmatch.fnmatchcase(layers[-1], name))


class _Resolved(NamedTuple):
    """An entry, resolved for given parameters."""

    is_global: bool  # one ranking over all leaves that the entry means
    types: dict[tree_lib.Path, Any]  # sparsity types of the leaves that the entry means
    axes: dict[tree_lib.Path, int]  # that count layers, which are ranked one by one
    sparsities: dict[tree_lib.Path, float]  # of the leaves that the entry means

    def pruner(self, sparsities: Mapping[tree_lib.Path, Any]) -> Any:
        """Makes the core's pruner that carries the entry out, at these sparsities."""

        def distribution(params: Any, stacked: Any = ()) -> Any:
            return _tree_of({path: sparsities[path] for path in self.types}, params)

        if self.is_global:
            return algorithms.GlobalMagnitudePruning(
                sparsity_distribution_fn=distribution, use_normalization=False
            )
        return algorithms.MagnitudePruning(
            sparsity_distribution_fn=distribution,
            sparsity_type=lambda path, _: self.types.get(path),
            stacked=self.axes,
        )

    def new_masks(self, params: Any, old_masks: Any, sparsities: Mapping[Any, Any]) -> Any:
        """Makes masks of the leaves that the entry means; others keep theirs. What old masks prune counts as zero."""
        pruner, old = self.pruner(sparsities), _tree_of({}, params)
        if old_masks is not None:
            old = sparse_state_lib.unpack_masks(old_masks, params)
        scores = pruner.calculate_scores(sparse_state_lib.apply_mask(params, old))
        new = pruner.create_masks(scores, pruner.sparsity_distribution_fn(params))
        return tree_lib.map_with_missing(
            lambda _, new, old: old if new is None else new, params, new, old
        )


def _resolve(
    strategy: PruningStrategy, params: Any, stacked: tree_lib.Stacked
) -> dict[Any, _Resolved]:
    """Resolves and checks the entry of every epoch, and warns of partial groups."""
    all_paths, arrays, _ = tree_lib.flatten_with_paths(params)
    checks.check_arrays(all_paths, arrays)
    all_shapes = [array.shape for array in arrays]
    all_axes = tree_lib.layer_axes(stacked, all_paths, all_shapes, _names_leaf)
    axes, shapes = {}, {}
    for path, array, axis in zip(all_paths, arrays, all_axes, strict=True):
        if axis is not None:
            axes[path] = axis
        if tree_lib.holds_weights(array):  # what holds no floats has no name
            shapes[path] = tree_lib.layer_shape(array.shape, axis)
    paths = list(shapes)
    resolved = {}
    for entry in strategy.entries:
        if isinstance(entry.rates, tuple):
            named = tree_lib.values_by_leaf(
                tree_lib.read_rules(entry.rates, entry.where), paths, entry.where, _names_leaf
            )
            rates = {paths[i]: rate for i, rate in named.items()}
        else:
            rates = {path: entry.rates for path in paths if _is_kernel(path, shapes[path])}
            if not rates:
                names = ', '.join(repr('-'.join(path)) for path in paths[:6])
                raise ValueError(
                    f'{entry.where}: none of the parameters is known as a kernel (the first are {names}); name those '
                    f"to prune: method='{entry.method.partition('_')[0]}_local', prune_rate_pattern={{name: …}}"
                )
        types: dict[tree_lib.Path, Any] = {}
        sparsities: dict[tree_lib.Path, float] = {}
        for path, rate in rates.items():
            if isinstance(rate, NByM):
                types[path], sparsities[path] = rate, 1 - rate.n / rate.m
                where, shape = f'{entry.where}: {"-".join(path)}', shapes[path]
                if rest := rate.partial_group(shape, where):
                    caller_warnings.warn(
                        f'{where} has length {rate.line_length(shape)} along {rate.axis_words}, which m={rate.m} '
                        f'does not divide: its last group keeps {min(rate.n, rest)} of {rest}'
                    )
            elif rate is not None:
                types[path], sparsities[path] = sparsity_types.Unstructured(), 1 - rate
        resolved[entry.epoch] = _Resolved(entry.is_global, types, axes, sparsities)
    return resolved


def _tree_of(values: Mapping[tree_lib.Path, Any], params: Any) -> Any:
    """Makes a tree like the parameters, with `None` where there is no value."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    return tree_lib.unflatten(treedef, map(values.get, paths), leaves)


# The functions of a loop over epochs.


def pruning(
    state: Any,
    epoch: int | None = None,
    mask_key: tree_lib.PyTree | None = None,
    prune_strategy: Any = None,
    *,
    stacked: tree_lib.Stacked = (),
    use_packed_masks: bool = False,
) -> tuple[bool, tree_lib.PyTree | None]:
    """Makes new masks if the strategy has an entry for this epoch.

    Weights are ranked by magnitude. Those that `mask_key` prunes count as zero. Leaves that the entry does not mean
    keep their masks. Call it outside `jit`, or inside with a static `epoch`.

    Args:
      state: a flax `TrainState` (anything with `params` that can be replaced), an `nnx` state, or parameters.
      epoch: the epoch that has ended, a whole number; with `None` nothing is due, and the strategy is only checked.
      mask_key: the masks so far, `None` before the first.
      prune_strategy: a `PruningStrategy` or what `PruningStrategy.parse` reads; with `None` nothing is due.
      stacked: names or globs of leaves whose first axis counts layers (of a scan), or a mapping from them to that axis;
        each layer is ranked on its own.
      use_packed_masks: make masks at one bit per weight.

    Returns:
      Whether masks are new, and the masks: a tree like the parameters of uint8 arrays, `None` where dense. When nothing
      is due, `mask_key` as it was given.

    Raises:
      ValueError, TypeError: the strategy does not fit the parameters; any of its entries, not only one that is due.

    >>> import jax.numpy as jnp
    >>> params = {'Dense_0': {'bias': jnp.zeros(2), 'kernel': jnp.array([[1.0, -4.0], [3.0, -2.0]])}}
    >>> pruning(params, 1, None, {1: {'method': 'unstr_global', 'prune_rate_pattern': 0.5}})[1]['Dense_0']['kernel']
    Array([[0, 1],
           [1, 0]], dtype=uint8)
    """
    epoch = None if epoch is None else _parse_epoch(epoch)
    if prune_strategy is None:
        return False, mask_key
    params, _ = _parameters_of(state)
    entry = _resolve(PruningStrategy.parse(prune_strategy), params, stacked).get(epoch)
    if entry is None:
        return False, mask_key
    masks = entry.new_masks(params, mask_key, entry.sparsities)
    return True, sparse_state_lib.store_masks(masks, params, use_packed_masks, like=mask_key)


def pruning_apply(
    state: Any, mask_key: tree_lib.PyTree | None
) -> tuple[Any, tree_lib.PyTree | None]:
    """Sets the pruned weights to zero.

    Args:
      state: what `pruning` takes.
      mask_key: the masks, packed or not; `None` before the first.

    Returns:
      The masked state (the state itself if there are no masks), and `mask_key`.

    Raises:
      ValueError: a mask does not fit its parameter.

    >>> import jax.numpy as jnp
    >>> pruning_apply({'kernel': jnp.array([3.0, 4.0])}, {'kernel': jnp.array([1, 0], jnp.uint8)})[0]
    {'kernel': Array([3., 0.], dtype=float32)}
    """
    if mask_key is None:
        return state, None
    params, with_params = _parameters_of(state)
    return with_params(sparse_state_lib.apply_mask(params, mask_key)), mask_key


def initial_masks(
    state: Any,
    prune_strategy: Any,
    *,
    stacked: tree_lib.Stacked = (),
    use_packed_masks: bool = False,
) -> tree_lib.PyTree:
    """Masks that prune nothing: a first `mask_key` whose structure never changes.

    With `mask_key=None` at first, a leaf gets its mask from the first entry that means it, so that the structure of the
    masks changes from epoch to epoch, and with it the target that a checkpoint is restored into. `StrategyPruning`
    begins with these masks, too.

    Args:
      state: what `pruning` takes.
      prune_strategy: a `PruningStrategy` or what `PruningStrategy.parse` reads.
      stacked: as for `pruning`.
      use_packed_masks: make masks at one bit per weight.

    Returns:
      A tree like the parameters: masks of ones for leaves that some entry means, `None` for all others.

    Raises:
      ValueError, TypeError: the strategy does not fit the parameters.

    >>> import jax.numpy as jnp
    >>> params = {'bias': jnp.ones(2), 'kernel': jnp.ones((1, 2))}
    >>> initial_masks(params, {3: {'method': 'unstr_global', 'prune_rate_pattern': 0.5}})
    {'bias': None, 'kernel': Array([[1, 1]], dtype=uint8)}
    """
    pruner = StrategyPruning(
        prune_strategy, 1, first_epoch=0, stacked=stacked, use_packed_masks=use_packed_masks
    )
    return pruner.init_state(_parameters_of(state)[0]).masks


def _parameters_of(state: Any) -> tuple[tree_lib.PyTree, Callable[[Any], Any]]:
    """The parameters, and how a state with others is made; a model may have a field or an entry called params, too."""
    replace = getattr(state, 'replace', None) or getattr(state, '_replace', None)
    is_state = hasattr(state, 'opt_state') or jax.tree_util.all_leaves([state])
    if replace is None and is_state and hasattr(state, '__dataclass_fields__'):
        replace = functools.partial(dataclasses.replace, state)
    if replace is None or not hasattr(state, 'params') or isinstance(state, Mapping):
        return state, lambda params: params
    return state.params, lambda params: replace(params=params)


# A strategy inside an optimizer.


@dataclasses.dataclass(init=False)
class StrategyPruning(base_updater.BaseUpdater):
    """Carries out a strategy inside `wrap_optax`: it drives a jitted training loop that knows nothing of epochs.

    It equals, up to rounding, a loop over epochs that calls `pruning_apply` after every step, and `pruning` and
    `pruning_apply` after the last step of an epoch. On that step the parameters after the update are ranked, and the
    update lands on the new masks. A weight that a later entry keeps again starts at zero.

    Args:
      prune_strategy: a `PruningStrategy` or what `PruningStrategy.parse` reads.
      steps_per_epoch: calls of `update` in an epoch.
      first_epoch: the number of the first epoch, 1 as in `for epoch in range(1, num_epochs + 1)`.
      use_packed_masks, stacked: as in `BaseUpdater`.

    Raises:
      ValueError, TypeError: a setting is wrong; in `init`, the strategy does not fit the parameters.

    >>> import optax
    >>> strategy = {1: {'method': 'unstr_global', 'prune_rate_pattern': 0.5}}
    >>> tx = StrategyPruning(strategy, steps_per_epoch=1).wrap_optax(optax.sgd(0.1))
    >>> params = {'kernel': jnp.array([[1.0, -4.0]])}
    >>> tx.update({'kernel': jnp.zeros((1, 2))}, tx.init(params), params)[1].masks
    {'kernel': Array([[0, 1]], dtype=uint8)}
    """

    ranks_next_params: ClassVar[bool] = True
    regrows_from_zero: ClassVar[bool] = True

    prune_strategy: PruningStrategy
    steps_per_epoch: int
    first_epoch: int

    def __init__(
        self,
        prune_strategy: Any,
        steps_per_epoch: int,
        *,
        first_epoch: int = 1,
        use_packed_masks: bool = False,
        stacked: tree_lib.Stacked = (),
    ):
        self.prune_strategy = PruningStrategy.parse(prune_strategy)
        self.steps_per_epoch = sparsity_schedules.checked_step(
            'steps_per_epoch', steps_per_epoch, minimum=1
        )
        self.first_epoch = sparsity_schedules.checked_step('first_epoch', first_epoch)
        epochs = self.prune_strategy.epochs
        if epochs and epochs[0] < first_epoch:
            raise ValueError(
                f'prune_strategy has an entry for epoch {epochs[0]}, but epochs begin with {first_epoch}; pass '
                f'first_epoch={epochs[0]} if they are counted from there'
            )
        # The last step of each epoch that prunes, counted from 0.
        steps = tuple((epoch - first_epoch + 1) * self.steps_per_epoch - 1 for epoch in epochs)
        super().__init__(
            scheduler=sparsity_schedules.StepsSchedule(steps),
            use_packed_masks=use_packed_masks,
            stacked=stacked,
        )

    def _resolve(self, params: Any) -> list[_Resolved]:
        return list(_resolve(self.prune_strategy, params, self.stacked).values())

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The sparsity that the last entry to mean a leaf gives it; all entries are checked."""
        targets: dict[tree_lib.Path, float] = {}
        for entry in self._resolve(params):
            targets |= entry.sparsities
        return _tree_of(targets, params)

    def plan(self, params: tree_lib.PyTree) -> PruningPlan:
        """What happens to each leaf: what the last entry that means it leaves of it."""
        dense, why = base_updater.NoPruning().plan(params), 'no entry of the strategy means it'
        plans = {leaf.path: dataclasses.replace(leaf, why_dense=why) for leaf in dense}
        for entry in self._resolve(params):
            pruned = entry.pruner(entry.sparsities).plan(params)
            plans |= {leaf.path: leaf for leaf in pruned if leaf.path in entry.types}
        counts = [leaf.kept for leaf in plans.values()]
        kept = None if None in counts else sum(count or 0 for count in counts)
        return PruningPlan(type(self).__name__, tuple(plans.values()), kept)

    def update_state(self, sparse_state, params, grads):
        """The masks after this epoch's entry."""
        del grads
        entries = self._resolve(params)
        if not entries:
            return sparse_state
        scheduler: Any = self.scheduler
        due = jnp.searchsorted(jnp.asarray(scheduler.steps, jnp.int32), sparse_state.count)
        sparsities = {}
        for path in dict.fromkeys(path for entry in entries for path in entry.types):
            of_entries = [entry.sparsities.get(path, 0.0) for entry in entries]
            sparsities[path] = jnp.asarray(of_entries, jnp.float32)[due]
        # Entries that differ in their rates alone share a branch, so that a gradual strategy is compiled once.
        plans = [(entry.is_global, entry.types) for entry in entries]
        branches = [plan for number, plan in enumerate(plans) if plan not in plans[:number]]
        masks = jax.lax.switch(
            jnp.asarray([branches.index(plan) for plan in plans])[due],
            [entries[plans.index(plan)].new_masks for plan in branches],
            params,
            sparse_state.masks,
            sparsities,
        )
        return sparse_state._replace(masks=masks)

    def instant_sparsify(self, params, grads=None):
        """All entries at once, in their order."""
        del grads
        masks = _tree_of({}, params)
        for entry in self._resolve(params):
            masks = entry.new_masks(params, masks, entry.sparsities)
        checks.check_masks(self, params, masks)
        return self.apply_masks(params, masks), masks
