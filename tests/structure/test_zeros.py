"""Groups are exact where removing channels equals zeroing them, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups
from structure import filled, hostile
from structure.values import values_like
from uses.test_models import MODELS


def make(function):
    rng = np.random.default_rng(0)
    params = {
        'up': jnp.asarray(rng.normal(size=(3, 6)), jnp.float32),
        'down': jnp.asarray(rng.normal(size=(6, 2)), jnp.float32),
    }

    def apply(p, x):
        return function(x @ p['up']) @ p['down']

    return apply, params, jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)


@pytest.mark.parametrize(('function', 'exact'), hostile.MODELS.values(), ids=hostile.MODELS)
def test_a_group_is_exact_only_if_zeros_stay_apart(function, exact):
    apply, params, x = make(function)
    graph = channel_groups(apply, params, x)
    assert graph.groups['up[1]'].exact == exact
    assert bool(graph.groups['up[1]'].reason) != exact
    with jax.debug_nans(False):
        assert filled.check(graph, params, (x,)) > 0


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_what_is_known_of_removed_channels_is_there(model):
    apply_fn, params, inputs = model.make()
    params, inputs = values_like(params, inputs)
    graph = channel_groups(apply_fn, params, *inputs)
    assert filled.check(graph, params, inputs) or not graph.groups
