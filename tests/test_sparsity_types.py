"""Sparsity types: validated, hashable, read from text, chosen for each leaf."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxpruner
from jaxpruner import sparsity_types as types

STRINGS = {
    'unstructured': types.Unstructured(),
    'nm_2,4': types.NByM(2, 4),
    'nm_1,5,0': types.NByM(1, 5, 0),
    ' 2 : 4 ': types.NByM(2, 4),
    'block_4,8': types.Block([4, 8]),  # a list, as from a config file
    'channel_-1': types.Channel(-1),
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
    assert types.parse_sparsity_type('rows_of_2') == Rows(100)  # the longest name
    params = {'w': jnp.array([[1.0, 2], [3, 4], [5, 6], [0, 0]]), 'head': jnp.ones((2, 2))}
    pruner = jaxpruner.create_updater_from_config(
        {'algorithm': 'magnitude', 'sparsity': 0.5, 'sparsity_type': {'w': 'rows_2', '*': None}}
    )
    masks = pruner.instant_sparsify(params)[1]
    assert masks['w'].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert masks['head'] is None
    with pytest.raises(ValueError, match='w: 2 does not divide 3'):
        pruner.plan(params | {'w': jnp.ones((3, 2))})
    with pytest.raises(ValueError, match=r"unknown sparsity type 'rows2'.*'rows'"):
        types.parse_sparsity_type('rows2')


def test_what_cannot_be_registered(register):
    for name in ('rows:2', 'block', 3):
        with pytest.raises(ValueError, match=f'got {name!r}'):
            register(name, rows)
    with pytest.raises(TypeError, match=r"'rows': .*got Rows\(height=1\)"):
        register('rows', Rows())
    register('rows', lambda text: None)
    with pytest.raises(TypeError, match=r"sparsity_type: 'rows_2' is no sparsity type"):
        jaxpruner.MagnitudePruning(sparsity_type='rows_2')


# A class, what it is given, and the error.
BAD = [
    (types.NByM, (5, 4), ValueError, r'n must not exceed m, got n=5, m=4'),
    (types.NByM, (0, 4), ValueError, r'n must be at least 1, got 0'),
    (types.NByM, (2, 4, (0, 0.5)), TypeError, 'axis must be a whole number, got 0.5'),
    (types.Block, ((4,),), ValueError, r'block_shape must be \(height, width\), got \(4,\)'),
    (types.Block, ((4, 0),), ValueError, r'block width must be at least 1, got 0'),
    (types.Channel, ('last',), TypeError, r"axis must be a whole number, got 'last'"),
    (types.parse_sparsity_type, ('2/4',), ValueError, "unknown sparsity type '2/4'; write 'unstr"),
]


@pytest.mark.parametrize(('make', 'arguments', 'error', 'message'), BAD)
def test_bad_types(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(*arguments)


BAD_SHAPES = [
    (types.NByM(2, 4, 'input'), (8, 8), '.*with_input_axes'),
    (types.NByM(2, 4, (0, -3)), (4, 6, 8), r'NByM\(.*\) names an axis of shape \(4, 6, 8\) twice'),
    (types.NByM(2, 5, (0, 1)), (4, 6, 8), 'shape .* length 24 along axes 0, 1 as one, which m=5'),
    (types.NByM(2, 4), (8, 10), r'shape \(8, 10\) has length 10 along axis -1, which m=4 does not'),
    (types.Channel(-3), (8, 8), 'axis -3 does not exist'),
]


@pytest.mark.parametrize(('sparsity_type', 'shape', 'message'), BAD_SHAPES)
def test_shapes_that_do_not_fit(sparsity_type, shape, message):
    with pytest.raises(ValueError, match=f'^d/kernel: {message}'):
        sparsity_type.check_shape(shape, 'd/kernel')


BAD_SETTINGS = [
    (types.NByM, r'is no sparsity type; use Unstructured\(\), NByM\(2, 4\)'),
    (7, r'7 is no sparsity type; use Unstructured\(\)'),
    ({}, 'has no rule'),
    ({'haed/*': None}, r"'haed/\*' matches no parameter; the nearest are 'head/kernel'"),
]


@pytest.mark.parametrize(('setting', 'message'), BAD_SETTINGS)
def test_bad_settings(setting, message):
    params = {'head': {'kernel': jnp.ones((8, 8))}}
    with pytest.raises((TypeError, ValueError), match=message):
        jaxpruner.MagnitudePruning(sparsity=0.5, sparsity_type=setting).plan(params)


SETTINGS = [
    # the first name that matches wins
    ({'head/*': None, '*/kernel': '2:4'}, [types.NByM(2, 4), None]),
    # what no name matches is unstructured
    ({('head', 'kernel'): 'channel_-1'}, [types.Unstructured(), types.Channel(-1)]),
    (lambda path, leaf: '2:4' if leaf.ndim == 2 else None, [types.NByM(2, 4), None]),
]


@pytest.mark.parametrize(('setting', 'expected'), SETTINGS)
def test_each_leaf_has_its_type(setting, expected):
    params = {'a': {'kernel': jnp.ones((4, 4))}, 'head': {'kernel': jnp.ones((4, 4, 4))}}
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, sparsity_type=setting)
    plan = pruner.plan(params)
    assert [plan[name].sparsity_type for name in ('a/kernel', 'head/kernel')] == expected


class RowRelative(types.Unstructured):
    """Ranks weights against the sum of their row."""

    def group_scores(self, scores):
        return scores / scores.sum(axis=-1, keepdims=True)


def test_a_subclass_of_unstructured_ranks_by_its_own_scores():
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, sparsity_type=RowRelative())
    params = {'w': jnp.array([[1.0, 2], [30, 10]])}
    assert pruner.instant_sparsify(params)[1]['w'].tolist() == [[0, 1], [1, 0]]
    assert 'unstructured' not in str(pruner.plan(params))


class Unspread(Rows):
    """A type whose verdicts are not spread over the columns, as a first attempt may be."""

    def spread_groups(self, group_mask, shape):
        return group_mask[:, None]


@pytest.mark.parametrize(
    'settings',
    [{'sparsity_type': Unspread()}, {'topk_fn': lambda scores, sparsity: scores[:, :1] > 0}],
)
def test_masks_of_another_shape_are_refused_where_they_are_made(settings):
    with pytest.raises(ValueError, match=r'(spread_groups|topk_fn).*\(16, 8\).*\(16, 1\)'):
        jaxpruner.MagnitudePruning(sparsity=0.5, **settings).instant_sparsify(jnp.ones((16, 8)))
