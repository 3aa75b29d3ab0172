"""Uses of the leaves of models: of frameworks, and of such in which axes are easily taken for one another."""

import pytest

from jaxpruner import tree
from jaxpruner.uses import param_uses
from uses import adversarial, models
from uses.table import short_uses


@pytest.mark.parametrize('model', models.MODELS.values(), ids=models.MODELS)
def test_frameworks(model):
    apply_fn, params, inputs = model.make()
    graph = param_uses(apply_fn, params, *inputs)
    expected = {}
    for path in tree.flatten_with_paths(params)[0]:
        glob = next(glob for glob in model.expected if tree.matches(glob, path))
        expected[tree.path_string(path)] = model.expected[glob]
    assert short_uses(graph) == expected
    assert model.flops in (None, graph.flops)


@pytest.mark.parametrize('model', adversarial.MODELS.values(), ids=adversarial.MODELS)
def test_adversarial_models(model):
    graph = param_uses(model.apply_fn, model.params, *model.inputs)
    opaque = {tree.path_string(path): 'opaque' for path in graph.opaque}
    assert short_uses(graph) | opaque == model.uses
