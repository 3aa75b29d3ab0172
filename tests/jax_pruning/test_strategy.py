"""Strategies: read from dicts and files, refused where they cannot be meant."""

import json

import numpy as np
import pytest

from jaxpruner.jax_pruning import PruningEntry, PruningStrategy, gradual_strategy
from jaxpruner.sparsity_types import NByM

TWO_OF_FOUR, ONE_OF_FOUR = NByM(2, 4, allow_partial=True), NByM(1, 4, allow_partial=True)


def entry(method='unstr_global', rate=0.9, **more):
    return {'method': method, 'prune_rate_pattern': rate, **more}


GOOD = {
    'a density': ({1: entry()}, [PruningEntry(1, 'unstr_global', 0.9)]),
    'everything': ({1: entry(rate=1)}, [PruningEntry(1, 'unstr_global', 1.0)]),
    'a tuple': (
        {0: entry('str_unified_local', (2, 4))},
        [PruningEntry(0, 'str_unified_local', TWO_OF_FOUR)],
    ),
    'a list': ({0: entry('str_global', [2, 4])}, [PruningEntry(0, 'str_global', TWO_OF_FOUR)]),
    'text': ({'3': entry('str_local', ' 2 : 4 ')}, [PruningEntry(3, 'str_local', TWO_OF_FOUR)]),
    'an axis': (
        {3: entry('str_local', (1, 2), prune_axis=0)},
        [PruningEntry(3, 'str_local', NByM(1, 2, 0, allow_partial=True), 0)],
    ),
    'an N:M type with its axis': (
        {0: entry('str_global', NByM(2, 4, 0))},
        [PruningEntry(0, 'str_global', NByM(2, 4, 0, allow_partial=True))],
    ),
    'layers': (
        {1: entry('unstr_local', {'head': None, 'out': 'dense', '*-kernel': 0.5})},
        [PruningEntry(1, 'unstr_local', (('head', None), ('out', None), ('*-kernel', 0.5)))],
    ),
    'layers under unified_local': (
        {1: entry('str_unified_local', {'a-kernel': '1:4'})},
        [PruningEntry(1, 'str_unified_local', (('a-kernel', ONE_OF_FOUR),))],
    ),
    'epochs in their order': (
        {20: entry(rate=0.5), 10: entry()},
        [PruningEntry(10, 'unstr_global', 0.9), PruningEntry(20, 'unstr_global', 0.5)],
    ),
    'nothing': ({}, []),
}


@pytest.mark.parametrize(('setting', 'entries'), GOOD.values(), ids=GOOD)
def test_what_is_read(setting, entries):
    strategy = PruningStrategy.parse(setting)
    assert strategy == PruningStrategy(tuple(entries))
    assert hash(strategy) == hash(PruningStrategy.parse(setting))
    assert PruningStrategy.parse(strategy) is strategy


BAD = {
    'no mapping': (7, TypeError, r'prune_strategy must be \{epoch: .*; got 7'),
    'an entry that is none': ({1: 0.9}, TypeError, r'prune_strategy\[1\] must be \{"method": …'),
    'an epoch that is none': ({'ten': entry()}, TypeError, r"epochs, whole numbers, got 'ten'"),
    'half an epoch': ({1.5: entry()}, TypeError, r'epochs, whole numbers, got 1.5'),
    'a negative epoch': ({-1: entry()}, ValueError, r'must not be negative, got -1'),
    'an epoch twice': (
        {10: entry(), '10': entry()},
        ValueError,
        r'two entries for epoch 10; put them into one',
    ),
    'an unknown key': (
        {1: entry(prune_rate=3)},
        ValueError,
        r"prune_strategy\[1\]: key 'prune_rate' is unknown; did you "
        r"mean 'prune_rate_pattern'",
    ),
    'no method': (
        {1: {'prune_rate_pattern': 0.9}},
        ValueError,
        r"prune_strategy\[1\] lacks the key 'method'",
    ),
    'no rate': (
        {1: {'method': 'unstr_global'}},
        ValueError,
        r"prune_strategy\[1\] lacks the key 'prune_rate_pattern'",
    ),
    'an unknown method': (
        {10: entry('unstr_globl')},
        ValueError,
        r"prune_strategy\[10\]: method 'unstr_globl' is unknown; "
        r"did you mean 'unstr_global'",
    ),
    'a method that is no text': ({10: entry(3)}, ValueError, r'method 3 is unknown; known are'),
    'density 0': (
        {1: entry(rate=0)},
        ValueError,
        r'prune_strategy\[1\]: prune_rate_pattern must lie in \(0, 1\].*got 0',
    ),
    'density in per cent': ({1: entry(rate=90)}, ValueError, r'got 90; 90.0 per cent is 0.9'),
    'density NaN': ({1: entry(rate=float('nan'))}, ValueError, r'must lie in \(0, 1\]'),
    'density of a truth value': (
        {1: entry(rate=True)},
        TypeError,
        r'must be a number above 0 and at most 1, got True',
    ),
    'density of nothing': (
        {1: entry(rate=None)},
        TypeError,
        r'must be a number above 0 and at most 1, got None',
    ),
    'density of a layer': (
        {1: entry('unstr_local', {'a-kernel': 2.5})},
        ValueError,
        r"prune_strategy\[1\]: 'a-kernel' must lie in \(0, 1\]",
    ),
    'N > M': (
        {5: entry('str_local', (5, 4))},
        ValueError,
        r'prune_strategy\[5\]: prune_rate_pattern: .*n must not exceed m',
    ),
    'N = 0': ({5: entry('str_local', (0, 4))}, ValueError, r'n must be at least 1, got 0'),
    'three numbers': (
        {5: entry('str_local', (1, 2, 4))},
        TypeError,
        r'an N:M pattern is written \(n, m\).*got \(1, 2, 4\)',
    ),
    'a fraction': (
        {5: entry('str_local', '2/4')},
        TypeError,
        r"an N:M pattern is written \(n, m\).*got '2/4'",
    ),
    'a density for str': (
        {5: entry('str_global', 0.5)},
        ValueError,
        r'a str_ method takes \(N, M\), got 0.5',
    ),
    'a pattern for unstr': (
        {5: entry('unstr_local', (2, 4))},
        ValueError,
        r'takes a density, the share kept, got \(2, 4\)',
    ),
    'layers for global': (
        {1: entry(rate={'a-kernel': 0.5})},
        ValueError,
        r"one density; .*use method='unstr_local'",
    ),
    'no layers': (
        {1: entry('unstr_local', {})},
        ValueError,
        r'prune_rate_pattern gives no layer a rate; .* leave the entry out',
    ),
    'an axis for unstr': (
        {1: entry(prune_axis=0)},
        ValueError,
        r"prune_axis has no meaning for 'unstr_global'",
    ),
    'an axis that is none': (
        {1: entry('str_local', '2:4', prune_axis='x')},
        TypeError,
        r"prune_axis must be a whole number, or None for the last axis, got 'x'",
    ),
    'nothing but dense layers': (
        {1: entry('unstr_local', {'a': None, 'b': 'dense'})},
        ValueError,
        r'prune_strategy\[1\]: prune_rate_pattern gives no layer a rate',
    ),
    'a layer without a name': (
        {1: entry('unstr_local', {3: 0.5})},
        TypeError,
        r"layers are named by text, such as 'Dense_0-kernel', got 3",
    ),
    'an array of densities': (
        {1: entry(rate=np.ones(2))},
        TypeError,
        r'must be a number above 0 and at most 1',
    ),
    'two axes': (
        {1: entry('str_local', NByM(2, 4, 1), prune_axis=0)},
        ValueError,
        r'lies along axis 1, but axis 0 is asked for',
    ),
    'no file': ('strategy.yaml', ValueError, r'must end in .toml or .json'),
}


@pytest.mark.parametrize(('setting', 'error', 'message'), BAD.values(), ids=BAD)
def test_what_is_refused(setting, error, message):
    with pytest.raises(error, match=message):
        PruningStrategy.parse(setting)


ENTRIES = [
    (
        (1, 'unstr_global', 90),
        ValueError,
        r'prune_strategy\[1\]: prune_rate_pattern must lie in \(0, 1\]',
    ),
    ((1, 'str_global', 0.5), ValueError, r'a str_ method takes \(N, M\), got 0.5'),
    ((-1, 'unstr_global', 0.5), ValueError, r'must not be negative, got -1'),
    (
        (1, 'unstr_local', (('a', 5.0),)),
        ValueError,
        r"prune_strategy\[1\]: 'a' must lie in \(0, 1\]",
    ),
]


@pytest.mark.parametrize(('arguments', 'error', 'message'), ENTRIES)
def test_entries_made_by_hand_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        PruningEntry(*arguments)


def test_entries_made_by_hand_are_read():
    assert PruningEntry(1, 'str_global', (2, 4)) == PruningEntry(1, 'str_global', TWO_OF_FOUR)
    with pytest.raises(
        TypeError,
        match=r'entries must be PruningEntry objects, got \{1: .* use PruningStrategy\.parse',
    ):
        PruningStrategy({1: entry()})


TOML = """
[10]
method = "str_unified_local"
prune_rate_pattern = [2, 4]

[20]
method = "unstr_local"
prune_rate_pattern = { Dense_0-kernel = 0.9, head-kernel = "dense" }
"""


def test_files(tmp_path):
    (tmp_path / 'strategy.toml').write_text(TOML)
    by_hand = {
        10: entry('str_unified_local', (2, 4)),
        20: entry('unstr_local', {'Dense_0-kernel': 0.9, 'head-kernel': None}),
    }
    (tmp_path / 'strategy.json').write_text(json.dumps(by_hand))
    for name in ('strategy.toml', 'strategy.json'):
        assert PruningStrategy.parse(tmp_path / name) == PruningStrategy.parse(by_hand)
    (tmp_path / 'half.toml').write_text(TOML[:30])
    with pytest.raises(ValueError, match=r'half\.toml is no valid TOML'):
        PruningStrategy.parse(str(tmp_path / 'half.toml'))
    (tmp_path / 'wrong.json').write_text(
        '{"10": {"method": "unstr_global", "prune_rate_pattern": 90}}'
    )
    with pytest.raises(
        ValueError,
        match=r'wrong\.json: prune_strategy\[10\]: prune_rate_pattern must lie in \(0, 1\]',
    ):
        PruningStrategy.parse(tmp_path / 'wrong.json')
    with pytest.raises(FileNotFoundError, match='missing'):
        PruningStrategy.parse(tmp_path / 'missing.json')


def rates(strategy):
    return [rule.rates for rule in strategy.entries]


def test_gradual_strategies():
    # Examples 1 and 2 of JAX-Pruning's document.
    example_1 = gradual_strategy(range(10, 100, 10), 0.1)
    assert example_1 == PruningStrategy.parse(
        {10 * i: entry('unstr_unified_local', (10 - i) / 10) for i in range(1, 10)}
    )
    assert gradual_strategy([50], (2, 4)) == PruningStrategy.parse(
        {50: entry('str_unified_local', (2, 4))}
    )
    # 1 - t^3 with power 3, as the polynomial schedule.
    assert rates(gradual_strategy([1, 2], 0.2, 'unstr_global', power=3)) == [0.3, 0.2]
    patterns = [NByM(n, 8, allow_partial=True) for n in (6, 4, 2)]
    assert rates(gradual_strategy([1, 2, 3], '2:8')) == patterns
    assert rates(gradual_strategy([1], 1.0)) == [1.0]
    assert rates(gradual_strategy([1, 2], 1e-13)) == [0.5, 1e-13]


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (([], 0.5), ValueError, r'epochs must be ascending whole numbers, at least one, got \[\]'),
        (([2, 1], 0.5), ValueError, r'got \[2, 1\]'),
        (([1, 1], 0.5), ValueError, r'got \[1, 1\]'),
        (([1.5], 0.5), TypeError, r'whole numbers, got 1.5'),
        (([1], 0.0), ValueError, r'final must lie in \(0, 1\]'),
        (([1], '5:4'), ValueError, r'final: .*n must not exceed m'),
        (([1], 0.5, 'str_global'), ValueError, r'final: a str_ method takes \(N, M\), got 0.5'),
        (([1], 0.5, 'global'), ValueError, r"gradual_strategy: method 'global' is unknown"),
        (([1], 0.5, None, 0), ValueError, r'power must be positive, got 0'),
        (([1], 0.5, None, '3'), TypeError, r"power must be a number, got '3'"),
        (
            (10, 0.5),
            TypeError,
            r'epochs must be several whole numbers, such as range\(10, 100, 10\), got 10',
        ),
    ],
)
def test_gradual_strategies_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        gradual_strategy(*arguments)
