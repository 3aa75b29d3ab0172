"""What the graph says of models, against perturbations of their weights."""

import pytest

from uses import brute_force
from uses.adversarial_models import MODELS


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_graphs_say_what_the_models_do(model):
    brute_force.check(*model)
