"""The axes of every value of every model, against permuted programs."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.structure import channel_groups
from structure import permuted
from structure.values import values_like
from uses import adversarial_models, adversarial_programs
from uses.test_models import MODELS

ADVERSARIAL = adversarial_models.MODELS | adversarial_programs.MODELS


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_values_of_models_are_permuted_as_their_axes_say(model):
    apply_fn, params, inputs = model.make()
    params, inputs = values_like(params, inputs)
    graph = channel_groups(apply_fn, params, *inputs)
    compared, moved = permuted.check(graph, params, inputs)
    assert compared
    assert moved or not graph.groups


def with_channels(apply_fn, inputs):
    """The model with its inputs as parameters, too, and its results summed to a number: no axis is pinned for them."""

    def apply(params, *whole_numbers):
        model_params, floats = params
        rest = iter(whole_numbers)
        arguments = [next(rest) if float_input is None else float_input for float_input in floats]
        results = jax.tree.leaves(apply_fn(model_params, *arguments))
        return sum(jnp.sum(result) for result in results)

    floats = [x if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in inputs]
    rest = [x for x, is_float in zip(inputs, floats, strict=True) if is_float is None]
    return apply, floats, rest


@pytest.mark.parametrize('model', ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_values_of_adversarial_models_are_permuted_as_their_axes_say(model):
    apply_fn, params, *inputs = model
    params, inputs = values_like(params, inputs)
    apply, floats, rest = with_channels(apply_fn, inputs)
    graph = channel_groups(apply, (params, floats), *rest)
    compared, moved = permuted.check(graph, (params, floats), rest)
    assert compared
    assert moved or not graph.groups
