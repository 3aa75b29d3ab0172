"""Uses of models in all frameworks, against tables of what is expected of each leaf."""

import pytest

from jaxpruner import tree
from jaxpruner.uses import param_uses
from uses import equinox_models, haiku_models, linen_models, nnx_models
from uses.table import expected_uses, short_uses

FRAMEWORKS = {
    'linen': linen_models,
    'nnx': nnx_models,
    'equinox': equinox_models,
    'haiku': haiku_models,
}
MODELS = {
    f'{framework} {name}': model
    for framework, models in FRAMEWORKS.items()
    for name, model in models.MODELS.items()
}


@pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
def test_uses(model):
    apply_fn, params, inputs = model.make()
    graph = param_uses(apply_fn, params, *inputs)
    names = [tree.path_string(path) for path in tree.flatten_with_paths(params)[0]]
    used = short_uses(graph)
    assert graph.opaque == {}
    assert used == expected_uses(model, list(used))
    unused = [
        name
        for name in names
        if any(tree.matches(glob, tuple(name.split('/'))) for glob in model.unused)
    ]
    assert list(map(tree.path_string, graph.unused)) == unused
    if model.flops is not None:
        assert graph.flops == model.flops
