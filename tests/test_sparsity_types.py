"""Sparsity types: validated, hashable, read from text, chosen for each leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxpruner
from jaxpruner import mask_calculator
from jaxpruner import sparsity_types as types
from jaxpruner.sparsity_types import normalize_setting, resolve_types

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


@dataclasses.dataclass(frozen=True)
class Rows:
    """Bands of neighbouring rows, kept or removed whole."""

    height: int = 1

    def check_shape(self, shape, where):
        if shape[0] % self.height:
            raise ValueError(f'{where}: {self.height} does not divide {shape[0]}')

    def group_scores(self, scores):
        return scores.reshape(-1, self.height * scores.shape[1]).sum(axis=1)

    def spread_groups(self, group_mask, shape):
        return jnp.broadcast_to(jnp.repeat(group_mask, self.height)[:, None], shape)


def rows(text):
    return Rows(int(text.rpartition('_')[2])) if '_' in text else Rows()


@pytest.fixture
def register(monkeypatch):
    monkeypatch.setattr(types, '_OWN_TYPES', {})
    return jaxpruner.register_sparsity_type


def test_a_registered_type_is_read_wherever_a_config_string_is(register):
    register('rows', rows)
    register('rows_of', lambda text: Rows(100))
    assert types.parse_sparsity_type('rows') == Rows(1)
    assert types.parse_sparsity_type('rows_2') == Rows(2)
    assert types.parse_sparsity_type('rows_of_2') == Rows(100)  # the longest name
    assert types.parse_sparsity_type('nm_2,4') == types.NByM(2, 4)
    params = {'w': jnp.array([[1.0, 2], [3, 4], [5, 6], [0, 0]]), 'head': jnp.ones((2, 2))}
    pruner = jaxpruner.create_updater_from_config(
        {'algorithm': 'magnitude', 'sparsity': 0.5, 'sparsity_type': {'w': 'rows_2', '*': None}}
    )
    masks = pruner.instant_sparsify(params)[1]
    assert masks['w'].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert masks['head'] is None
    topk_fn = mask_calculator.get_topk_fn('rows')
    assert topk_fn(params['w'], 0.5).tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    for unknown in ('row', 'rows2', 'xrows_2'):
        with pytest.raises(ValueError, match=f"unknown sparsity type '{unknown}'.*'rows'"):
            types.parse_sparsity_type(unknown)


@pytest.mark.parametrize(
    ('name', 'parse', 'error', 'message'),
    [
        (3, rows, TypeError, r'must be a string, such as .*, got 3'),
        ('rows:2', rows, ValueError, r"'rows:2' .*letters, digits and _"),
        ('', rows, ValueError, r"'' .*letters, digits and _"),
        *[
            (name, rows, ValueError, f"'{name}' is .* of the library")
            for name in ('unstructured', 'nm', 'block', 'channel', 'dense')
        ],
        ('rows', Rows(), TypeError, r"'rows': .* a function of the text, .*got Rows\(height=1\)"),
        ('taken', rows, ValueError, r"'taken' is .*read by .*<lambda>"),
    ],
)
def test_what_cannot_be_registered(name, parse, error, message, register):
    register('taken', lambda text: Rows())
    with pytest.raises(error, match=message):
        register(name, parse)


def test_a_cell_of_a_notebook_registers_again(register):
    def again(text):
        return Rows(7)

    again.__module__, again.__qualname__ = rows.__module__, rows.__qualname__
    register('rows', rows)
    register('rows', again)
    assert types.parse_sparsity_type('rows_2') == Rows(7)


@pytest.mark.parametrize('made', ['2:4', None, Rows])
def test_a_function_that_makes_no_type_is_refused(made, register):
    register('rows', lambda text: made)
    with pytest.raises(TypeError, match=r"'rows_2': .* registered for 'rows' .*no sparsity type"):
        types.parse_sparsity_type('rows_2')


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
    (Renamed(), False),
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
