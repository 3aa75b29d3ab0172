"""Which channels stay: scores, rankings, budgets and limits; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.structure import channel_groups, choosing
from uses.table import scan

# Of 'a[1]' channel 3 is the largest, then 1, 2, 0; of 'b[1]' each is larger than the one before.
PARAMS = {
    'a': jnp.array([[1.0, 4, 2, -8], [1, 4, 2, 8], [1, 4, 2, 8]]),
    'b': jnp.ones((4, 8)) * jnp.arange(1.0, 9),
    'c': jnp.ones((8, 2)),
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
BEST_OF_A, BEST_OF_B = [3, 1, 2, 0], [7, 6, 5, 4, 3, 2, 1, 0]


def apply(p, x):
    return jnp.tanh(jnp.tanh(x @ p['a']) @ p['b']) @ p['c']


GRAPH = channel_groups(apply, PARAMS, X)


def parameters(a, b):
    return 3 * a + a * b + 2 * b


def counts_of(choice):
    return choice.counts['a[1]'], choice.counts['b[1]']


@pytest.mark.parametrize(
    ('quantity', 'share', 'ranking'),
    [('parameters', 0.2, 'all'), ('flops', 0.5, 'each'), ('bytes', 0.9, 'all')],
)
def test_budgets_are_met_and_nothing_more_would_fit(quantity, share, ranking):
    choice = GRAPH.choose(PARAMS, f'{quantity}={share}', ranking=ranking)
    a, b = counts_of(choice)
    assert choice.before.parameters == parameters(4, 8)
    assert choice.after.parameters == parameters(a, b) <= share * parameters(4, 8)
    assert a == 4 or parameters(a + 1, b) > share * parameters(4, 8)
    assert b == 8 or parameters(a, b + 1) > share * parameters(4, 8)
    for name, best, count in (('a[1]', BEST_OF_A, a), ('b[1]', BEST_OF_B, b)):
        if count < len(best):
            assert choice.keep[name].tolist() == sorted(best[:count])
        else:
            assert name not in choice.keep


# Settings -> how many stay of a and of b. Of squares mean scores of a are 1.05, 1.75, 1.19, 4.01, those of b
# 1.04, 1.16, 1.35, 1.63, 1.98, 2.41, 2.92, 3.51.
SETTINGS = {
    'each loses the same share': ({'budget': 'parameters=0.5'}, (2, 6)),
    'multiples': ({'budget': 'parameters=0.5', 'round_to': 2}, (2, 6)),
    'left alone': ({'budget': 'parameters=0.5', 'leave': 'a[1]'}, (4, 3)),
    'others left alone': ({'budget': 'parameters=0.5', 'leave': ['b*']}, (1, 8)),
    'ranked in each group': ({'budget': 'parameters=0.3', 'score': jnp.square}, (2, 3)),
    'ranked in all': ({'budget': 'parameters=0.3', 'score': jnp.square, 'ranking': 'all'}, (1, 5)),
}


@pytest.mark.parametrize('ranking', ['each', 'all'])
def test_no_budget_is_exceeded(ranking):
    for share in np.linspace(0.2, 0.9, 15):
        choice = GRAPH.choose(PARAMS, f'parameters={share}', ranking=ranking)
        assert choice.after.parameters <= share * parameters(4, 8)


@pytest.mark.parametrize(('settings', 'counts'), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_search(settings, counts):
    choice = GRAPH.choose(PARAMS, **settings)
    assert counts_of(choice) == counts
    assert choice.after.parameters == parameters(*counts)
    small = GRAPH.shrink(PARAMS, choice.keep, verify=False)
    assert sum(leaf.size for leaf in small.values()) == choice.after.parameters


def weights_times_gradients(weights, gradients):
    return abs(weights * gradients)


def only_of_a(weights, member):
    return jnp.abs(weights) if member.path == ('a',) else None


def distances(weights, group):
    """The sum of distances to other channels: the median has the least."""
    assert group.size == len(weights)
    return jnp.abs(weights[:, None] - weights).sum((1, 2))


GRADIENTS = {'a': PARAMS['a'][:, ::-1], 'b': jnp.ones((4, 8)), 'c': jnp.ones((8, 2))}
# Score -> the scores of 'a[1]', before they are normalised, of the kernel before and of that behind it.
SCORES = {
    'magnitude': ('magnitude', [3, 12, 6, 24], [36, 36, 36, 36]),
    'an algorithm': (jaxpruner.SaliencyPruning(), [24, 24, 24, 24], [36, 36, 36, 36]),
    'a function of weights': (weights_times_gradients, [24, 24, 24, 24], [36, 36, 36, 36]),
    'a function of some members': (only_of_a, [3, 12, 6, 24], None),
    'a function of channels': (distances, [None] * 4, [0, 0, 0, 0]),
}


@pytest.mark.parametrize(('score', 'before', 'behind'), SCORES.values(), ids=SCORES)
def test_scores(score, before, behind):
    if score is distances:
        columns = np.asarray(PARAMS['a']).T
        before = np.abs(columns[:, None] - columns).sum((1, 2))
    tables = [np.asarray(each) for each in (before, behind) if each is not None]
    choice = GRAPH.choose(PARAMS, counts={'a[1]': 2}, score=score, gradients=GRADIENTS)
    normalised = [table / (table.mean() or 1) for table in tables]
    np.testing.assert_allclose(choice.scores['a[1]'], np.sum(normalised, axis=0), rtol=1e-6)


@pytest.mark.parametrize('name', ['wanda', 'ria'])
def test_calibrated_scores_look_at_inputs(name):
    """Equal weights behind: what counts is how large the inputs of that kernel are."""
    params = {'a': jnp.array([[1.0, 2, 3, 4]]), 'b': jnp.ones((4, 2))}
    graph = channel_groups(lambda p, x: jnp.tanh(x @ p['a']) @ p['b'], params, jnp.ones((1, 1)))
    settings = {'counts': {'a[1]': 2}, 'score': name, 'progress': False}
    choice = graph.choose(params, batches=[0.1 * jnp.ones((3, 1))], **settings)
    assert choice.keep['a[1]'].tolist() == graph.choose(params, **settings).keep['a[1]'].tolist()
    assert choice.keep['a[1]'].tolist() == [2, 3]


LAYERS = {
    'up': jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 6))),
    'down': jnp.asarray(np.random.default_rng(2).normal(size=(3, 6, 2))),
}
SCANNED = channel_groups(
    lambda p, x: scan(lambda x, layer: x + jnp.tanh(x @ layer['up']) @ layer['down'], x, p),
    LAYERS,
    jnp.ones((5, 2)),
)


def test_each_layer_of_a_scan_has_a_list_of_its_own():
    choice = SCANNED.choose(LAYERS, 'parameters=0.5')
    sums = np.abs(LAYERS['up']).sum(1), np.abs(LAYERS['down']).sum(2)
    expected = sum(table / table.mean() for table in sums)
    np.testing.assert_allclose(choice.scores['up[2]'], expected, rtol=1e-6)
    assert choice.keep['up[2]'].tolist() == np.sort(np.argsort(-expected)[:, :3]).tolist()
    best = np.sort(expected)[:, 3:].sum() / expected.sum()
    np.testing.assert_allclose(choice.score_share('up[2]'), best, rtol=1e-6)
    assert choice.score_share('up[2]') > expected[:, [0, 1, 2]].sum() / expected.sum()
    assert SCANNED.verify(LAYERS, choice.keep, jnp.ones((5, 2))).verdict == 'equal'


def test_layers_go_only_if_they_are_named():
    assert list(SCANNED.choose(LAYERS, 'flops=0.5').keep) == ['up[2]']
    (depth,) = [group.name for group in SCANNED.groups.values() if group.is_depth]
    sums = [np.abs(LAYERS[name]).sum((1, 2)) for name in ('up', 'down')]
    totals = sum(table / table.mean() for table in sums)
    assert SCANNED.choose(LAYERS, counts={depth: 1}).keep[depth].tolist() == [np.argmax(totals)]


def test_what_goes_with_other_groups_does_not_count():
    params = {
        'a': jnp.array([[10.0, 1]]),
        'b': jnp.array([[1.0, 2], [5, 0]]),
        'c': jnp.ones((2, 1)),
    }
    graph = channel_groups(apply, params, jnp.ones((3, 1)))
    for score in ('magnitude', jnp.abs):
        choice = graph.choose(params, counts={'b[1]': 1}, score=score)
        assert choice.keep['b[1]'].tolist() == [0]
        choice = graph.choose(params, counts={'*': 1}, score=score)
        assert choice.keep['a[1]'].tolist() == [0]
        assert choice.keep['b[1]'].tolist() == [1]
        np.testing.assert_allclose(choice.scores['b[1]'], [1 / 1.5 + 1, 2 / 1.5 + 1])


def test_groups_with_lists_for_each_other_are_refused():
    params = {'w': jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)))}
    graph = channel_groups(lambda p, x: (jnp.tanh(p['w']) * x.sum()).sum(), params, X)
    with pytest.raises(ValueError, match=r"own each other's lists.*leave it whole"):
        graph.shrink(params, graph.choose(params, 'parameters=0.4').keep)
    choice = graph.choose(params, 'parameters=0.5', leave='w[0]')
    assert choice.keep['w[1]'].shape == (6, 2)
    assert graph.verify(params, choice.keep, X).verdict == 'equal'


def test_latency_is_met_with_a_handful_of_candidates(monkeypatch):
    timed = []

    def latency_function(graph, params, batch):
        assert graph is GRAPH
        assert params is PARAMS
        assert batch.shape == (7, 3)

        def seconds(counts):
            timed.append(counts)
            a, b = counts.get('a[1]', 4), counts.get('b[1]', 8)
            return 0.001 + 0.01 * parameters(a, b) / parameters(4, 8)

        return seconds

    monkeypatch.setattr(choosing, 'latency_function', latency_function)
    choice = GRAPH.choose(PARAMS, 'latency=0.5', batches=[jnp.ones((7, 3))], progress=False)
    before, after = choice.milliseconds
    assert before == pytest.approx(11)
    assert after == pytest.approx(1 + 10 * choice.after.parameters / 60)
    assert after <= 5.5
    assert len(timed) <= 14
    assert str(choice).splitlines()[-1].split()[:2] == ['milliseconds', '11']
    with pytest.raises(ValueError, match=r"'latency=0.05' cannot be met"):
        GRAPH.choose(PARAMS, 'latency=0.05', batches=[jnp.ones((7, 3))], progress=False)


def test_a_state_goes_first_in_a_batch():
    def with_state(p, state, x):
        return jnp.tanh(x @ p['a'] - state['mean']) @ p['b'], state

    params = {'a': PARAMS['a'], 'b': jnp.ones((4, 2))}
    state = {'mean': jnp.array([0.0, 1, 2, 3])}
    graph = channel_groups(with_state, params, X, state=state)
    settings = {'counts': {'a[1]': 2}, 'score': 'wanda', 'progress': False}
    by_batch = graph.choose(params, batches=[(state, X)], **settings).scores['a[1]']
    np.testing.assert_allclose(graph.choose(params, **settings).scores['a[1]'], by_batch)
    hidden = jnp.tanh(X @ params['a'] - state['mean'])
    inputs = jnp.linalg.norm(X, axis=0) @ jnp.abs(params['a'])
    norms = jnp.linalg.norm(hidden, axis=0)
    expected = inputs / inputs.mean() + norms / norms.mean()
    np.testing.assert_allclose(by_batch, expected, rtol=1e-5)


def test_a_choice_is_printed_as_a_table():
    lines = str(GRAPH.choose(PARAMS, 'parameters=0.5', leave='b[1]')).splitlines()
    assert lines[2].split() == ['a[1]', '1', '4', '0.392']
    assert lines[3].split() == ['b[1]', '8', '8', 'left', 'alone']
    assert lines[-3].split() == ['parameters', '60', '27', '0.450']


HALF = {'budget': 'parameters=0.5'}
INEXACT = channel_groups(lambda p, x: jax.nn.softmax(x @ p['a']) @ p['b'], PARAMS, X)
SHAPES = channel_groups(apply, PARAMS, jax.eval_shape(lambda: X))
REFUSED = [
    ({}, ValueError, 'budget=None, counts=None'),
    ({'counts': {'a[1]': 2}, 'round_to': 2}, ValueError, 'round_to and leave have no'),
    ({**HALF, 'ranking': 'al'}, ValueError, "ranking='al'.*'all'"),
    ({'budget': 'flop=0.5'}, ValueError, 'flop=0.5.*flops'),
    ({'budget': 0.5}, ValueError, 'budget=0.5'),
    ({**HALF, 'round_to': 0}, ValueError, 'round_to=0: give a whole number'),
    ({**HALF, 'round_to': 8}, ValueError, r"'parameters=0.5'.* 1\.0000 of the whole"),
    ({**HALF, 'score': 'magnitud'}, ValueError, "'magnitud'.*'magnitude'"),
    ({**HALF, 'score': 5}, TypeError, 'score is .*got 5'),
    ({**HALF, 'score': 'saliency'}, ValueError, 'Saliency.* gradients=…'),
    ({**HALF, 'score': only_of_a}, ValueError, r"b\[1\]: no m.*leave='b\[1\]'"),
    ({**HALF, 'score': lambda weights: weights[0]}, ValueError, 'got shape'),
    ({**HALF, 'score': 'grasp'}, ValueError, "GraSP scores no channels; take 'wanda'"),
    ({**HALF, 'score': 'wanda', 'graph': SHAPES}, ValueError, 'Wanda .*batches=…'),
    ({**HALF, 'leave': 'x*'}, KeyError, r"leave: 'x\*' matches no group"),
    ({'counts': {'a': 2}}, KeyError, r"counts: 'a' matches no group; .*'a\[1\]'"),
    ({**HALF, 'leave': '*'}, ValueError, r"no group to choose from: .'a\[1\]': 'left"),
    ({**HALF, 'graph': INEXACT}, ValueError, r"choose from: .'a\[1\]': 'not exact"),
    ({'counts': {'a[1]': 2}, 'graph': INEXACT}, ValueError, "'a.*not .*allow_inexact"),
    ({'counts': {'a[1]': 0}}, ValueError, r"counts\['a\[1\]'\] is 0; .*1 to 4"),
    ({'counts': {'a[1]': 5}}, ValueError, r"counts\['a\[1\]'\] is 5; .*1 to 4"),
    (
        {**HALF, 'params': {**PARAMS, 'b': PARAMS['b'].at[2, 5].set(jnp.nan)}},
        ValueError,
        r'scores of a\[1\] for b are not finite',
    ),
    (
        {**HALF, 'params': {**PARAMS, 'a': PARAMS['a'][:2]}},
        ValueError,
        r'a has shape \(2, 4\), .* \(3, 4\)',
    ),
    ({**HALF, 'params': {**PARAMS, 'd': X}}, ValueError, 'has another structure'),
    ({**HALF, 'params': jax.eval_shape(lambda: PARAMS)}, ValueError, 'has no scores for these p'),
]


@pytest.mark.parametrize(('settings', 'error', 'message'), REFUSED)
def test_settings_are_refused(settings, error, message):
    settings = {'graph': GRAPH, 'params': PARAMS, **settings}
    with pytest.raises(error, match=message):
        settings.pop('graph').choose(settings.pop('params'), **settings)
