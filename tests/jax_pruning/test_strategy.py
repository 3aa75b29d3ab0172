"""Strategies: read from dicts and files, refused where they cannot be meant."""

import json
import re

import pytest

from jaxpruner.jax_pruning import PruningEntry, PruningStrategy, gradual_strategy
from jaxpruner.sparsity_types import NByM


def pattern(n, m, axis=-1):
    return NByM(n, m, axis, allow_partial=True)


def entry(method='unstr_global', rate=0.9, **more):
    return {'method': method, 'prune_rate_pattern': rate, **more}


# A setting, and for each entry its epoch, method and rates.
GOOD = {
    'a density': ({1: entry()}, [(1, 'unstr_global', 0.9)]),
    'a list': ({0: entry('str_global', [2, 4])}, [(0, 'str_global', pattern(2, 4))]),
    'text': ({'3': entry('str_local', ' 2 : 4 ')}, [(3, 'str_local', pattern(2, 4))]),
    'a type': ({0: entry('str_global', NByM(2, 4, 0))}, [(0, 'str_global', pattern(2, 4, 0))]),
    'layers': (
        {1: entry('unstr_local', {'head': None, 'out': 'dense', '*-kernel': 0.5})},
        [(1, 'unstr_local', (('head', None), ('out', None), ('*-kernel', 0.5)))],
    ),
    'epochs in their order': (
        {20: entry(rate=0.5), 10: entry()},
        [(10, 'unstr_global', 0.9), (20, 'unstr_global', 0.5)],
    ),
    'nothing': ({}, []),
}


@pytest.mark.parametrize(('setting', 'entries'), GOOD.values(), ids=GOOD)
def test_what_is_read(setting, entries):
    strategy = PruningStrategy.parse(setting)
    assert strategy == PruningStrategy(tuple(PruningEntry(*each) for each in entries))
    assert [(each.epoch, each.method, each.rates) for each in strategy.entries] == entries
    assert hash(strategy) == hash(PruningStrategy.parse(setting))
    assert PruningStrategy.parse(strategy) is strategy


WHERE = r'prune_strategy\[1\]'
BAD = [
    (7, TypeError, r'prune_strategy must be \{epoch: .*; got 7'),
    ({'ten': entry()}, TypeError, r"an epoch must be a whole number, got 'ten'"),
    ({1: entry(prune_rate=3)}, ValueError, WHERE + " has the keys .*'prune_rate'.*; write"),
    ({1: {'method': 'unstr_global'}}, ValueError, WHERE + r" has the keys \['method'\]; write"),
    ({1: entry('unstr_globl')}, ValueError, WHERE + ": method 'unstr_globl' .* 'unstr_global'"),
    ({1: entry(rate=90)}, ValueError, r'got 90; 90.0 per cent is 0.9'),
    ({1: entry('str_local', (5, 4))}, ValueError, WHERE + ': prune_rate_pattern: .*not exceed m'),
    ({1: entry('str_global', 0.5)}, TypeError, WHERE + r'.* pattern is written .*got 0.5'),
    ({1: entry(rate={'a-kernel': 0.5})}, ValueError, r"one density; .*use method='unstr_local'"),
    ({1: entry('unstr_local', {'a': None, 'b': 'dense'})}, ValueError, 'gives no layer a rate'),
    ({1: entry(prune_axis=0)}, ValueError, r"prune_axis has no meaning for 'unstr_global'"),
    ({1: entry('str_local', NByM(2, 4, 1), prune_axis=0)}, ValueError, r'but axis 0 is asked for'),
    ('strategy.yaml', ValueError, r'must end in .toml or .json'),
]  # fmt: skip


@pytest.mark.parametrize(('setting', 'error', 'message'), BAD)
def test_what_is_refused(setting, error, message):
    with pytest.raises(error, match=message):
        PruningStrategy.parse(setting)


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
    (tmp_path / 'wrong.json').write_text(json.dumps({1: entry(rate=90)}))
    with pytest.raises(ValueError, match=r'wrong\.json: prune_strategy\[1\]: prune_rate_pattern'):
        PruningStrategy.parse(tmp_path / 'wrong.json')


GRADUAL = [
    # Examples 1 and 2 of JAX-Pruning's document.
    ((range(10, 100, 10), 0.1), 'unstr_unified_local', [i / 10 for i in range(9, 0, -1)]),
    (([50], (2, 4)), 'str_unified_local', [pattern(2, 4)]),
    # 1 - t^3 with power 3, as the polynomial schedule.
    (([1, 2], 0.2, 'unstr_global', 3), 'unstr_global', [0.3, 0.2]),
    (([1, 2, 3], '2:8'), 'str_unified_local', [pattern(n, 8) for n in (6, 4, 2)]),
    (([1, 2], 1e-13), 'unstr_unified_local', [0.5, 1e-13]),
]


@pytest.mark.parametrize(('arguments', 'method', 'rates'), GRADUAL)
def test_gradual_strategies(arguments, method, rates):
    strategy = gradual_strategy(*arguments)
    assert strategy.epochs == tuple(arguments[0])
    assert {each.method for each in strategy.entries} == {method}
    assert [each.rates for each in strategy.entries] == rates


def test_gradual_strategies_that_are_refused():
    for epochs in ([], [1, 1]):
        with pytest.raises(ValueError, match=rf'epochs must .* got {re.escape(str(epochs))}'):
            gradual_strategy(epochs, 0.5)
    with pytest.raises(ValueError, match='power must be positive'):
        gradual_strategy([1], 0.5, None, 0)
