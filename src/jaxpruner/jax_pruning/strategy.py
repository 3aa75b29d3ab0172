"""Strategies: what is pruned at which epoch, read once from what users write into validated objects."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpruner import sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.files import config_files
from jaxpruner.sparsity_types import NByM

METHODS = (
    'unstr_global unstr_unified_local unstr_local str_global str_unified_local str_local'.split()
)
# A density, the share kept, for unstructured methods; n of m for structured ones.
Rate = float | NByM
_DENSE = 'dense'
_KEYS = ('method', 'prune_rate_pattern', 'prune_axis')


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
    rates: Rate | tuple[tuple[Any, Rate | None], ...]
    prune_axis: int | None = None

    def __post_init__(self):
        object.__setattr__(self, 'epoch', _parse_epoch(self.epoch))
        _check_method(self.method, self.where)
        check_axis(self.prune_axis, f'{self.where}: prune_axis')
        if self.prune_axis is not None and not self.is_structured:
            raise ValueError(
                f'{self.where}: prune_axis has no meaning for {self.method!r}; leave it out, or use str_…'
            )
        if self.names_layers and self.method == 'unstr_global':
            raise ValueError(
                f'{self.where}: unstr_global ranks all layers together, so it takes one density; to give layers '
                "densities of their own use method='unstr_local'"
            )
        if isinstance(self.rates, tuple) and self.names_layers:
            rates = self._read_layer_rates(self.rates)
        else:
            rates = self._read_rate(self.rates, 'prune_rate_pattern')
        object.__setattr__(self, 'rates', rates)

    def _read_layer_rates(self, pairs: tuple[tuple[Any, Any], ...]) -> tuple:
        named_rates = []
        for name, rate in pairs:
            if not isinstance(name, str | tuple):
                raise TypeError(
                    f"{self.where}: layers are named by text, such as 'Dense_0-kernel', got {name!r}"
                )
            is_dense = rate is None or (isinstance(rate, str) and rate == _DENSE)
            named_rates.append((name, None if is_dense else self._read_rate(rate, repr(name))))
        if all(rate is None for _, rate in named_rates):
            raise ValueError(
                f'{self.where}: prune_rate_pattern gives no layer a rate; write {{"Dense_0-kernel": …}}, or one rate '
                'for all, or leave the entry out'
            )
        return tuple(named_rates)

    def _read_rate(self, rate: Any, setting: str) -> Rate:
        return _parse_rate(rate, self.is_structured, self.prune_axis, f'{self.where}: {setting}')

    @property
    def where(self) -> str:
        """How messages call the entry."""
        return f'prune_strategy[{self.epoch}]'

    @property
    def is_structured(self) -> bool:
        """Whether it prunes N of M."""
        return self.method.startswith('str_')

    @property
    def is_global(self) -> bool:
        """Whether one ranking covers all layers; N:M is the same everywhere, so `str_global` has none."""
        return self.method == 'unstr_global'

    @property
    def names_layers(self) -> bool:
        """Whether each layer has a rate of its own."""
        # A pair of numbers is N:M.
        return isinstance(self.rates, tuple) and all(isinstance(pair, tuple) for pair in self.rates)


@dataclasses.dataclass(frozen=True)
class PruningStrategy:
    """Which epochs prune what; hashable, so that it may be a static argument of `jit`.

    Attributes:
      entries: one entry an epoch, in their order.

    Raises:
      ValueError: two entries have the same epoch.

    >>> strategy = PruningStrategy.parse({10: {'method': 'str_unified_local', 'prune_rate_pattern': '2:4'}})
    >>> strategy.epochs
    (10,)
    """

    entries: tuple[PruningEntry, ...]

    def __post_init__(self):
        is_sequence = not isinstance(self.entries, str | Mapping)
        if not is_sequence or not all(isinstance(entry, PruningEntry) for entry in self.entries):
            raise TypeError(
                f'entries must be PruningEntry objects, got {self.entries!r}; use PruningStrategy.parse'
            )
        entries = tuple(sorted(self.entries, key=lambda entry: entry.epoch))
        object.__setattr__(self, 'entries', entries)
        for earlier, later in itertools.pairwise(entries):
            if earlier.epoch == later.epoch:
                raise ValueError(
                    f'prune_strategy has two entries for epoch {later.epoch}; put them into one'
                )

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
            content = config_files.read(setting)
            try:
                return cls.parse(content)
            except (ValueError, TypeError) as error:
                raise type(error)(f'{os.fspath(setting)}: {error}') from error
        if not isinstance(setting, Mapping):
            raise TypeError(
                'prune_strategy must be {epoch: {"method": …, "prune_rate_pattern": …}}, a PruningStrategy, or the '
                f'path of a TOML or JSON file; got {setting!r}'
            )
        entries = []
        for epoch, entry in setting.items():
            entries.append(_parse_entry(_parse_epoch(epoch), entry))
        return cls(tuple(entries))

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
    if not isinstance(epochs, Iterable) or isinstance(epochs, str):
        raise TypeError(
            f'epochs must be several whole numbers, such as range(10, 100, 10), got {epochs!r}'
        )
    if isinstance(power, bool | str) or not hasattr(power, '__float__'):
        raise TypeError(f'power must be a number, got {power!r}')
    numbers = list(map(_parse_epoch, epochs))
    if not numbers or numbers != sorted(set(numbers)):
        raise ValueError(f'epochs must be ascending whole numbers, at least one, got {numbers}')
    if not power > 0:
        raise ValueError(f'power must be positive, got {power}')
    is_pattern = isinstance(final, str | list | tuple | NByM)
    method = method or ('str_unified_local' if is_pattern else 'unstr_unified_local')
    _check_method(method, 'gradual_strategy')
    final_rate = _parse_rate(final, method.startswith('str_'), None, 'final')
    entries = []
    for i, epoch in enumerate(numbers, 1):
        removed = 1 - (1 - i / len(numbers)) ** power
        entries.append(PruningEntry(epoch, method, _partial_rate(final_rate, removed)))
    return PruningStrategy(tuple(entries))


def check_axis(axis: Any, name: str) -> None:
    """Refuses an axis that is neither a whole number nor `None`, with a TypeError that calls it `name`."""
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise TypeError(f'{name} must be a whole number, or None for the last axis, got {axis!r}')


def _partial_rate(final: Rate, removed: float) -> Rate:
    """The rate when a share `removed` of all weights to be removed has been removed."""
    if isinstance(final, NByM):
        return dataclasses.replace(final, n=final.m - round((final.m - final.n) * removed))
    if removed == 1:
        return final
    return round(1 - (1 - final) * removed, 12)  # 0.3, where floats give 0.30000000000000004


def _parse_epoch(epoch: Any) -> int:
    is_text = isinstance(epoch, str) and epoch.strip().isdecimal()
    is_whole = hasattr(epoch, '__index__') and not isinstance(epoch, bool)
    if not is_text and not is_whole:
        raise TypeError(f'the keys of prune_strategy are epochs, whole numbers, got {epoch!r}')
    number = int(epoch)
    if number < 0:
        raise ValueError(
            f'the keys of prune_strategy are epochs and must not be negative, got {number}'
        )
    return number


def _parse_entry(epoch: int, entry: Any) -> PruningEntry:
    where = f'prune_strategy[{epoch}]'
    if isinstance(entry, PruningEntry):
        return dataclasses.replace(entry, epoch=epoch)
    if not isinstance(entry, Mapping):
        raise TypeError(f'{where} must be {{"method": …, "prune_rate_pattern": …}}, got {entry!r}')
    for key in entry:
        if key not in _KEYS:
            raise ValueError(
                f'{where}: key {key!r} is unknown; {tree_lib.nearest(str(key), _KEYS)}'
            )
    for key in _KEYS[:2]:
        if key not in entry:
            raise ValueError(
                f'{where} lacks the key {key!r}; write {{"method": …, "prune_rate_pattern": …}}'
            )
    pattern = entry['prune_rate_pattern']
    if isinstance(pattern, Mapping):
        pattern = tuple(pattern.items())
    return PruningEntry(epoch, entry['method'], pattern, entry.get('prune_axis'))


def _check_method(method: Any, where: str) -> None:
    if method not in METHODS:
        raise ValueError(
            f'{where}: method {method!r} is unknown; {tree_lib.nearest(str(method), METHODS)}'
        )


def _parse_rate(rate: Any, is_structured: bool, axis: Any, where: str) -> Rate:
    """A density or an N:M pattern, whichever the method takes."""
    is_pattern = isinstance(rate, str | list | tuple | NByM)
    if is_pattern != is_structured:
        rule, other = 'an unstr_ method takes a density, the share kept', 'str_'
        if is_structured:
            rule, other = 'a str_ method takes (N, M)', 'unstr_'
        raise ValueError(
            f'{where}: {rule}, got {rate!r}; write that, or a method that begins with {other}'
        )
    if not is_structured:
        sparsity_distributions.check_density(rate, where)
        return float(rate)
    try:
        return sparsity_types.parse_n_by_m(rate, axis)
    except (ValueError, TypeError) as error:
        raise type(error)(f'{where}: {error}') from error
