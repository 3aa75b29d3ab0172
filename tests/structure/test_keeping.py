"""What cannot be kept is refused before anything is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups, rules
from uses.table import scan

PARAMS = {'up': jnp.ones((3, 6)), 'out': jnp.ones((6, 2))}


def apply(p, x):
    return jnp.tanh(x @ p['up']) @ p['out']


GRAPH = channel_groups(apply, PARAMS, jnp.ones((5, 3)))
LAYERS = {'up': jnp.ones((3, 2, 6)), 'down': jnp.ones((3, 6, 2))}
SCANNED = channel_groups(
    lambda p, x: scan(lambda x, layer: jnp.tanh(x @ layer['up']) @ layer['down'], x, p),
    LAYERS,
    jnp.ones((5, 2)),
)

REFUSED = {
    'no mapping': ([0, 1], TypeError, 'got .0, 1.'),
    'unknown': ({'upp[1]': [0]}, KeyError, r"'upp\[1\]'; did you mean 'up\[1\]'"),
    'empty': ({'up[1]': []}, ValueError, r"keep\['up\[1\]'\] is empty"),
    'repeated': ({'up[1]': [0, 2, 2]}, ValueError, r"keep\['up\[1\]'\] has indices twice"),
    'unsorted': ({'up[1]': [0, 3, 1]}, ValueError, r"keep\['up\[1\]'\] .* out of order"),
    'foreign': ({'up[1]': [0, 6]}, IndexError, r"keep\['up\[1\]'\] has 6; .* from 0 to 5"),
    'negative': ({'up[1]': [-1, 0]}, IndexError, r"keep\['up\[1\]'\] has -1"),
    'floats': ({'up[1]': [0.5, 1.0]}, TypeError, r"keep\['up\[1\]'\] has .*0.5"),
    'a mask': ({'up[1]': np.ones(6, bool)}, TypeError, r"keep\['up\[1\]'\] .*flatnonzero"),
    'a table': ({'up[1]': [[0, 1]]}, ValueError, r"keep\['up\[1\]'\] has shape \(1, 2\)"),
    'two of three layers': ({'up[2]': [[0], [0]]}, ValueError, r'shape \(2, 1\); .* \(3, .kept.\)'),
    'lists unsorted': ({'up[2]': [[0, 1], [0, 1], [1, 0]]}, ValueError, 'out of order'),
    'lists empty': ({'up[2]': np.zeros((3, 0), int)}, ValueError, r"keep\['up\[2\]'\] is empty"),
}


@pytest.mark.parametrize(('keep', 'error', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused(keep, error, message):
    graph, params = (SCANNED, LAYERS) if 'up[2]' in keep else (GRAPH, PARAMS)
    for attempt in (graph.shrink, graph.zeroed, lambda params, keep: graph.small_apply(keep)):
        with pytest.raises(error, match=message):
            attempt(params, keep)


def test_indices_that_are_traced_are_refused():
    with pytest.raises(TypeError, match='traced'):
        jax.jit(lambda indices: GRAPH.shrink(PARAMS, {'up[1]': indices}))(jnp.arange(2))


def test_groups_that_are_not_exact_are_refused_and_differ():
    graph = channel_groups(
        lambda p, x: jax.nn.softmax(x @ p['up']) @ p['out'], PARAMS, jnp.ones((5, 3))
    )
    keep = {'up[1]': [0, 1, 4]}
    with pytest.raises(ValueError, match=r"'up\[1\]' is not the same.*reduce_max"):
        graph.shrink(PARAMS, keep)
    assert graph.shrink(PARAMS, {'up[1]': range(6)})['up'].shape == (3, 6)
    verification = graph.verify(PARAMS, keep, jnp.ones((5, 3)), allow_inexact=True)
    assert verification.verdict == 'different'


def test_where_the_removal_changes_nothing_nothing_is_proven():
    params = {**PARAMS, 'out': jnp.zeros((6, 2))}
    verification = GRAPH.verify(params, {'up[1]': [0, 2]}, jnp.ones((5, 3)))
    assert str(verification).startswith('unproven')


def test_shrinking_parameters_compares_the_smaller_model(monkeypatch):
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=leaf.shape)) for name, leaf in PARAMS.items()}
    x = jnp.asarray(rng.normal(size=(5, 3)))
    graph = channel_groups(apply, params, x)
    keep = {'up[1]': [0, 2]}
    graph.shrink(params, keep)
    twice = rules.ROWS['tanh']._replace(
        resized=lambda small, operands: [2 * result for result in small.run(operands)]
    )
    monkeypatch.setitem(rules.ROWS, 'tanh', twice)
    with pytest.raises(ValueError, match=r'differs from the whole one with zeros .different: '):
        graph.shrink(params, keep)

    def without_tanh(p, x):
        return x @ p['up'] @ p['out']

    both = channel_groups(without_tanh, params, x).also(apply, x)
    with pytest.raises(ValueError, match=r'with zeros in apply .different: '):
        both.shrink(params, keep)
    graph.shrink(params, keep, verify=False)
    graph.shrink(jax.tree.map(jnp.isfinite, params), keep)


@pytest.mark.parametrize('inside', ['float32', 'bfloat16'])
def test_errors_count_beside_the_coarsest_dtype_of_the_program(inside):
    @jax.jit
    def coarse(params, x):
        hidden = (x @ params['up']).astype(inside)
        return hidden.astype(jnp.float32) @ params['out']

    graph = channel_groups(coarse, PARAMS, jnp.ones((5, 3)))
    verification = graph.verify(PARAMS, {'up[1]': [0, 2]}, jnp.ones((5, 3)))
    assert verification.tolerance == float(jnp.finfo(inside).eps) ** 0.5
