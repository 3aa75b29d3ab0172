"""Sparsity types: validated, hashable, read from text, chosen for each leaf."""

import jax
import pytest

import jaxpruner
from jaxpruner import sparsity_types as types
from jaxpruner.sparsity_types.leaves import normalize_setting, resolve_types

STRINGS = {
    'unstructured': types.Unstructured(),
    'nm_2,4': types.NByM(2, 4),
    'nm_1,5,0': types.NByM(1, 5, 0),
    '2:4': types.NByM(2, 4),
    ' 2 : 4 ': types.NByM(2, 4),
    'block_4,8': types.Block((4, 8)),
    'channel_-1': types.Channel(-1),
    'channel_0': types.Channel(0),
}


@pytest.mark.parametrize(('text', 'expected'), STRINGS.items())
def test_config_strings(text, expected):
    assert types.parse_sparsity_type(text) == expected
    assert hash(types.parse_sparsity_type(text)) == hash(expected)


BAD = [
    (lambda: types.NByM(5, 4), ValueError, r'n must not exceed m, got n=5, m=4'),
    (lambda: types.NByM(0, 4), ValueError, r'n must be at least 1, got 0'),
    (lambda: types.NByM(2.0, 4), TypeError, r'n must be a whole number, got 2.0'),
    (
        lambda: types.NByM(2, 4, 'output'),
        TypeError,
        r"axis must be a whole number, a tuple .* or 'input', got 'output'",
    ),
    (
        lambda: types.NByM(2, 4, 'input').check_shape((8, 8), 'd/kernel'),
        ValueError,
        r'd/kernel: .*with_input_axes',
    ),
    (
        lambda: types.parse_n_by_m(types.NByM(2, 4, 'input')),
        ValueError,
        'give a number as its axis',
    ),
    (
        lambda: types.parse_n_by_m(types.NByM(2, 4, (0, 1))),
        ValueError,
        'give a number as its axis',
    ),
    (lambda: types.NByM(2, 4, ()), TypeError, r"a tuple of some, or 'input', got \(\)"),
    (lambda: types.NByM(2, 4, [0, 1]), TypeError, r"a tuple of some, or 'input', got \[0, 1\]"),
    (lambda: types.NByM(2, 4, (0, 0.5)), TypeError, 'axis must be a whole number, got 0.5'),
    (
        lambda: types.NByM(2, 4, (0, -3)).check_shape((4, 6, 8), 'out'),
        ValueError,
        r'out: NByM\(.*\) names an axis of shape \(4, 6, 8\) twice',
    ),
    (
        lambda: types.NByM(2, 5, (0, 1)).check_shape((4, 6, 8), 'out'),
        ValueError,
        r'out: shape \(4, 6, 8\) has length 24 along axes 0, 1 as one, which m=5 does not divide',
    ),
    (
        lambda: types.NByM(2, 4, (0, 3)).check_shape((4, 6, 8), 'out'),
        ValueError,
        r'out: axis 3 does not exist in shape \(4, 6, 8\)',
    ),
    (lambda: types.Block((4,)), ValueError, r'block_shape must be \(height, width\), got \(4,\)'),
    (lambda: types.Block((4, 0)), ValueError, r'block width must be at least 1, got 0'),
    (lambda: types.Channel('last'), TypeError, r"axis must be a whole number, got 'last'"),
    (
        lambda: types.parse_sparsity_type('2/4'),
        ValueError,
        r"unknown sparsity type '2/4'; write 'unstructured'",
    ),
    (lambda: types.parse_sparsity_type('5:4'), ValueError, r'n must not exceed m'),
    (
        lambda: normalize_setting(types.NByM),
        TypeError,
        r'is no sparsity type; write NByM\(…\)',
    ),
    (
        lambda: normalize_setting(7),
        TypeError,
        r'7 is no sparsity type; use Unstructured\(\)',
    ),
    (
        lambda: types.NByM(2, 4).check_shape((8, 10), 'd/kernel'),
        ValueError,
        r'd/kernel: shape \(8, 10\) has length 10 along axis -1, which m=4 does not divide',
    ),
    (
        lambda: types.NByM(2, 4, 2).check_shape((8, 8), 'd/kernel'),
        ValueError,
        r'd/kernel: axis 2 does not exist in shape \(8, 8\)',
    ),
    (
        lambda: types.Channel(-3).check_shape((8, 8), 'd/kernel'),
        ValueError,
        r'd/kernel: axis -3 does not exist',
    ),
]


@pytest.mark.parametrize(('make', 'error', 'message'), BAD)
def test_bad_types(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_list_from_a_config_file_becomes_a_hashable_block():
    assert hash(types.Block([2, 2])) == hash(types.Block((2, 2)))


PATHS = [('a', 'kernel'), ('head', 'kernel')]


def test_the_first_rule_that_matches_wins_and_the_rest_is_unstructured():
    setting = normalize_setting({'head/*': None, '*/kernel': '2:4'})
    assert resolve_types(setting, PATHS, [0, 0]) == [types.NByM(2, 4), None]
    setting = normalize_setting({('head', 'kernel'): 'channel_-1'})
    assert resolve_types(setting, PATHS, [0, 0]) == [
        types.Unstructured(),
        types.Channel(-1),
    ]


def test_a_function_chooses_by_path_and_leaf():
    chosen = resolve_types(lambda path, leaf: '2:4' if leaf else None, PATHS, [True, False])
    assert chosen == [types.NByM(2, 4), None]


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError,
        match=r"sparsity_type: 'haed/\*' matches no parameter; the nearest are 'head/kernel'",
    ):
        resolve_types({'haed/*': None}, PATHS, [0, 0])


class Renamed(types.Unstructured):
    """Ranks weights as they are."""


class RowRelative(types.Unstructured):
    """Ranks weights against the sum of their row."""

    def group_scores(self, scores):
        return scores / scores.sum(axis=-1, keepdims=True)


class NoVectors(types.Unstructured):
    """Refuses vectors."""

    def check_shape(self, shape, where):
        assert len(shape) > 1, where


ARE_UNSTRUCTURED = [
    (types.Unstructured(), True),
    (Renamed(), True),
    (RowRelative(), False),
    (NoVectors(), False),
    (types.Channel(), False),
    (types.NByM(2, 4), False),
    (None, False),
]


@pytest.mark.parametrize(('sparsity_type', 'expected'), ARE_UNSTRUCTURED)
def test_a_subclass_that_pools_scores_is_not_unstructured(sparsity_type, expected):
    assert types.is_unstructured(sparsity_type) is expected


@pytest.mark.parametrize(('sparsity_type', 'expected'), ARE_UNSTRUCTURED[:3])
def test_a_plan_calls_unstructured_what_ranks_single_weights(sparsity_type, expected):
    plan = jaxpruner.MagnitudePruning(sparsity=0.5, sparsity_type=sparsity_type)
    params = {'w': jax.ShapeDtypeStruct((8, 8), 'float32')}
    assert ('unstructured' in str(plan.plan(params))) is expected
