"""What the graph says of models, against perturbations of their weights."""

import pytest

from uses import adversarial_models, adversarial_programs, brute_force, test_models

MODELS = adversarial_models.MODELS | adversarial_programs.MODELS
# Others of these hold no layer that is not in one of them, and take longer.
LAYERS = (
    'convolutions',
    'experts',
    'grouped queries',
    'lora',
    'norms',
    'tied',
    'weight norm',
    'resnet',
)
OF_FRAMEWORKS = {name: model for name, model in test_models.MODELS.items() if name.endswith(LAYERS)}


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_graphs_say_what_the_models_do(model):
    brute_force.check(*model)


@pytest.mark.parametrize('model', OF_FRAMEWORKS.values(), ids=OF_FRAMEWORKS)
def test_graphs_say_what_layers_of_frameworks_do(model):
    apply_fn, params, inputs = model.make()
    brute_force.check(apply_fn, params, *inputs)
