"""Groups of models in all frameworks, against a table by hand."""

from typing import NamedTuple

import pytest

from jaxpruner import tree
from jaxpruner.structure import channel_groups
from structure import filled, further_models, permuted
from structure.values import values_like
from uses.test_models import MODELS


class Row(NamedTuple):
    """A group: its channels, the parameters along them, whether it is exact, the sizes of what owns lists."""

    size: int
    parameters: int
    exact: bool = True
    lists: tuple[int, ...] = ()


# A stream of width 8, 2 heads of 4 features, 16 hidden units, 11 words: 864 parameters lie along the stream, since only
# biases of 24 + 16 + 11 do not.
EXPECTED = {
    'linen mlp': {
        'params/Dense_1/kernel[1]': Row(4, 36),
    },
    'linen cnn': {
        'params/Conv_0/kernel[3]': Row(4, 328),
        'params/Conv_1/kernel[3]': Row(6, 342),
    },
    'linen resnet': {
        'params/stem/kernel[3]': Row(4, 444),
        'params/Conv_0/kernel[3]': Row(8, 392),
    },
    'linen transformer': {
        'params/Embed_0/embedding[1]': Row(8, 864),
        'params/block/attention/query/kernel[2]': Row(4, 144, lists=(2,)),
        'params/block/attention/query/kernel[1]': Row(2, 280),
        'params/block/attention/value/kernel[2]': Row(4, 136, lists=(2,)),
        'params/block/Dense_1/kernel[1]': Row(16, 272),
    },
    'linen scanned': {
        'params/layers/LayerNorm_0/scale[0]': Row(3, 1800),
        'params/layers/attention/query/kernel[3]': Row(
            4,
            432,
            lists=(
                3,
                2,
            ),
        ),
        'params/layers/attention/query/kernel[2]': Row(2, 840, lists=(3,)),
        'params/layers/attention/value/kernel[3]': Row(
            4,
            408,
            lists=(
                3,
                2,
            ),
        ),
        'params/layers/Dense_1/kernel[2]': Row(16, 816, lists=(3,)),
    },
    'linen recurrent': {
        'params/LSTMCell_0/ii/kernel[1]': Row(6, 270),
    },
    'linen tied': {
        'params/Embed_0/embedding[1]': Row(8, 88),
    },
    'linen convolutions': {
        'params/grouped/kernel[3][0:4]': Row(4, 504),
    },
    'linen lora': {
        'params/a[1]': Row(2, 14),
    },
    'linen class token': {},
    'linen norms': {},
    'linen experts': {
        'params/router/kernel[1]': Row(3, 204, exact=False),
        'params/up[2]': Row(8, 192, lists=(3,)),
    },
    'linen grouped queries': {
        'params/query/kernel[2][0:3]': Row(3, 288),
        'params/query/kernel[1][0:4:2]': Row(2, 576),
        'params/query/kernel[1][0:2]': Row(2, 384, lists=(2,)),
        'params/value/kernel[2]': Row(6, 288, lists=(2,)),
    },
    'nnx mlp': {
        'first/kernel[1]': Row(4, 36),
    },
    'nnx resnet': {
        'stem/kernel[3]': Row(4, 1552),
    },
    'nnx transformer': {
        'embed/embedding[1]': Row(8, 864),
        'block/attention/query/kernel[2]': Row(4, 144, lists=(2,)),
        'block/attention/query/kernel[1]': Row(2, 280),
        'block/attention/value/kernel[2]': Row(4, 136, lists=(2,)),
        'block/up/kernel[1]': Row(16, 272),
    },
    'nnx scanned': {
        'layers/norm1/scale[0]': Row(3, 1800),
        'layers/attention/query/kernel[3]': Row(
            4,
            432,
            lists=(
                3,
                2,
            ),
        ),
        'layers/attention/query/kernel[2]': Row(2, 840, lists=(3,)),
        'layers/attention/value/kernel[3]': Row(
            4,
            408,
            lists=(
                3,
                2,
            ),
        ),
        'layers/up/kernel[2]': Row(16, 816, lists=(3,)),
    },
    'nnx recurrent': {},
    'nnx tied': {
        'embed/embedding[1]': Row(8, 88),
    },
    'nnx convolutions': {
        'grouped/kernel[3][0:4]': Row(4, 504),
    },
    'nnx lora': {
        'lora/lora/lora_a[1]': Row(2, 14),
    },
    'nnx class token': {},
    'nnx grouped queries': {
        'query/kernel[2][0:3]': Row(3, 288),
        'query/kernel[1][0:4:2]': Row(2, 576),
        'query/kernel[1][0:2]': Row(2, 384, lists=(2,)),
        'value/kernel[2]': Row(6, 288, lists=(2,)),
    },
    'nnx experts': {
        'up[2]': Row(8, 192, lists=(3,)),
        'up[0]': Row(3, 204, exact=False),
    },
    'equinox mlp': {
        'layers/0/weight[0]': Row(4, 36),
    },
    'equinox resnet': {
        '0/0/weight[0]': Row(4, 1552),
    },
    'equinox transformer': {
        'embed/weight[1]': Row(8, 856, exact=False),
        'block/attention/query_proj/weight[0][0:8:4]': Row(2, 264),
        'block/attention/query_proj/weight[0][0:4]': Row(4, 136, lists=(2,)),
        'block/attention/value_proj/weight[0][0:4]': Row(4, 128, lists=(2,)),
        'block/mlp/layers/0/weight[0]': Row(16, 272),
    },
    'equinox scanned': {
        'norm1/weight[0]': Row(3, 1728),
        'attention/query_proj/weight[1][0:8:4]': Row(2, 792, lists=(3,)),
        'attention/query_proj/weight[1][0:4]': Row(
            4,
            408,
            lists=(
                3,
                2,
            ),
        ),
        'attention/value_proj/weight[1][0:4]': Row(
            4,
            384,
            lists=(
                3,
                2,
            ),
        ),
        'mlp/layers/0/weight[1]': Row(16, 816, lists=(3,)),
    },
    'equinox recurrent': {},
    'equinox tied': {
        'weight[1]': Row(8, 88),
    },
    'equinox convolutions': {
        'grouped/weight[0][0:4]': Row(4, 504),
    },
    'equinox grouped queries': {
        'query/weight[0][0:24:12]': Row(2, 576),
        'query/weight[0][0:12:6]': Row(2, 384, lists=(2,)),
        'query/weight[0][0:3]': Row(3, 288),
        'value/weight[0][0:6]': Row(6, 288, lists=(2,)),
    },
    'equinox weight norm': {},
    'equinox class token': {},
    'haiku mlp': {
        'linear_1/w[1]': Row(4, 36),
    },
    'haiku resnet': {
        '0/conv2_d/w[3]': Row(4, 592),
    },
    'haiku transformer': {
        'embed/embeddings[1]': Row(8, 864, exact=False),
        'multi_head_attention/query/w[1][0:8:4]': Row(2, 280),
        'multi_head_attention/query/w[1][0:4]': Row(4, 144, lists=(2,)),
        'multi_head_attention/value/w[1][0:4]': Row(4, 136, lists=(2,)),
        'linear_2/w[1]': Row(16, 272),
    },
    'haiku scanned': {
        '__layer_stack_no_per_layer/layer_norm/scale[0]': Row(3, 1800),
        '__layer_stack_no_per_layer/multi_head_attention/query/w[2][0:8:4]': Row(
            2, 840, lists=(3,)
        ),
        '__layer_stack_no_per_layer/multi_head_attention/query/w[2][0:4]': Row(
            4,
            432,
            lists=(
                3,
                2,
            ),
        ),
        '__layer_stack_no_per_layer/multi_head_attention/value/w[2][0:4]': Row(
            4,
            408,
            lists=(
                3,
                2,
            ),
        ),
        '__layer_stack_no_per_layer/linear_1/w[2]': Row(16, 816, lists=(3,)),
    },
    'haiku recurrent': {},
    'haiku tied': {
        'embed/embeddings[1]': Row(8, 88),
    },
    'haiku convolutions': {
        'grouped/w[3][0:4]': Row(4, 504),
    },
    'haiku rms norm': {},
    'haiku grouped queries': {
        'query/w[1][0:24:12]': Row(2, 576),
        'query/w[1][0:12:6]': Row(2, 384, lists=(2,)),
        'query/w[1][0:3]': Row(3, 288),
        'value/w[1][0:6]': Row(6, 288, lists=(2,)),
    },
    'haiku class token': {},
    'haiku weight norm': {},
}


FURTHER = {
    'gated linear unit': {
        'up[1][0:8]': Row(8, 64),
    },
    'interleaved gates': {
        'up[1][0:16:2]': Row(8, 64),
    },
    'unequal parts': {
        'up[1][0:8]': Row(8, 24),
        'up[1][8:12]': Row(4, 20),
    },
    'squeeze and excitation': {
        'stem[3]': Row(8, 296),
        'squeeze[1]': Row(4, 64),
    },
    'pixel shuffle': {
        'stem[3][0:4]': Row(4, 504),
    },
    'group norm': {
        'stem[3][0:8:2]': Row(4, 248),
        'stem[3][0:2]': Row(2, 248, exact=False, lists=(4,)),
    },
    'batch norm in training': {
        'stem[3]': Row(8, 248),
    },
    'u net': {
        'down[3]': Row(8, 936),
        'mid[3]': Row(8, 832),
        'up[3]': Row(8, 400),
    },
    'dense net': {
        'a[3]': Row(4, 260),
        'b[3]': Row(4, 260),
    },
    'mixer': {
        'embed[1]': Row(8, 144),
        'tokens[1]': Row(7, 70),
        'up[1]': Row(6, 96),
    },
    'vision transformer': {
        'token[2]': Row(8, 352),
        'qkv[1][0:8:4]': Row(2, 256),
        'qkv[1][0:4]': Row(4, 128, lists=(2,)),
        'qkv[1][16:20]': Row(4, 128, lists=(2,)),
    },
    'relative positions': {
        'qkv[3]': Row(4, 96, lists=(2,)),
        'qkv[2]': Row(2, 114),
    },
    'multi query attention': {
        'q[2]': Row(6, 90),
        'q[1]': Row(4, 144),
        'v[1]': Row(6, 90),
    },
    'latent attention': {
        'compress[1]': Row(4, 108),
        'k[2]': Row(6, 84, lists=(2,)),
        'k[1]': Row(2, 168),
        'v[2]': Row(6, 84, lists=(2,)),
    },
    'linear attention': {
        'q[2]': Row(4, 48, exact=False, lists=(2,)),
        'q[1]': Row(2, 96),
        'v[2]': Row(4, 48, lists=(2,)),
    },
    'state space': {
        'in[1]': Row(8, 144),
        'a[1]': Row(4, 96),
    },
    'causal depthwise': {
        'in[1]': Row(8, 72),
    },
    'long convolution': {
        'in[1]': Row(8, 88),
    },
    'top two experts': {
        'up[2]': Row(8, 192),
    },
    'experts by groups of rows': {
        'up[2]': Row(8, 192),
    },
    'graph network': {
        'message[1]': Row(8, 72),
        'update[1]': Row(6, 78),
    },
    'weight norm': {
        'g[0]': Row(6, 66, exact=False),
        'v[0]': Row(8, 72),
    },
    'weight standardisation': {
        'kernel[3]': Row(6, 444),
        'kernel[2]': Row(8, 648, exact=False),
    },
    'bidirectional': {
        'forward[1]': Row(4, 36),
        'backward[1]': Row(4, 36),
    },
    'scanned and tied': {
        'embed[1]': Row(8, 488),
        'scale[0]': Row(2, 400),
        'up[2]': Row(12, 384, lists=(2,)),
    },
    'decoding with a cache': {},
    'maxout': {
        'up[1][0:12:3]': Row(4, 44),
        'up[1][0:3]': Row(3, 36, exact=False, lists=(4,)),
    },
    'splines': {
        'up[1]': Row(8, 264),
        'grid[2][0:4]': Row(4, 192),
        'grid[1]': Row(6, 252),
    },
    'adapters': {
        'up[1]': Row(8, 104),
        'a[1]': Row(2, 32),
        'b[1]': Row(8, 96),
    },
    'convolutional block attention': {
        'stem[3]': Row(8, 296),
        'squeeze[1]': Row(4, 64),
    },
    'dynamic int8': {
        'up[1]': Row(8, 40),
        'down[1]': Row(2, 20),
    },
    'bilinear pooling': {
        'up[1]': Row(4, 44),
    },
    'square matrix stored flat': {
        'up[1]': Row(6, 66),
    },
    'shuffle net': {
        'stem[3][0:16:4]': Row(4, 736),
        'stem[3][0:4]': Row(4, 592),
    },
}


@pytest.mark.parametrize('name', MODELS)
def test_groups(name):
    apply_fn, params, inputs = MODELS[name].make()
    assert rows(channel_groups(apply_fn, params, *inputs)) == EXPECTED[name]


@pytest.mark.parametrize('name', further_models.MODELS)
def test_groups_of_further_models(name):
    apply_fn, params, inputs = further_models.MODELS[name]
    graph = channel_groups(apply_fn, params, *inputs)
    assert rows(graph) == FURTHER[name]
    params, inputs = values_like(params, inputs)
    permuted.check(graph, params, inputs)
    assert filled.check(graph, params, inputs) or not graph.groups


def rows(graph):
    found = {}
    for group in graph.groups.values():
        assert bool(group.reason) != group.exact
        lists = tuple(owner.size for owner in group.lists)
        found[group.name] = Row(group.size, group.parameters, group.exact, lists)
    return found


@pytest.mark.parametrize('name', MODELS)
def test_each_leaf_is_in_a_group_or_pinned_or_unused(name):
    apply_fn, params, inputs = MODELS[name].make()
    graph = channel_groups(apply_fn, params, *inputs)
    in_groups = {member.path for group in graph.groups.values() for member in group.members}
    pinned = {each.path for each in graph.pinned}
    paths, leaves, _ = tree.flatten_with_paths(params)
    assert in_groups | pinned | set(graph.unused) == set(paths)
    assert not set(graph.unused) & (in_groups | pinned)
    for path, leaf in zip(paths, leaves, strict=True):
        if path in graph.unused:
            continue
        for axis, size in enumerate(leaf.shape):
            assert covered(graph, path, axis) == (size if size > 1 else 0)


def covered(graph, path, axis):
    """How many indices of an axis are in a group or pinned, as the product or sum of the parts says."""
    (number,) = [i for i, each in enumerate(graph.trace.paths) if each == path]
    parts = []
    for group in graph.groups.values():
        for member in group.members:
            if (member.path, member.axis) == (path, axis):
                parts.append(set(member.positions().ravel().tolist()))
    pinned = [each for each in graph.pinned if (each.path, each.axis) == (path, axis)]
    if pinned:
        return graph.trace.leaves[number][axis].size
    return len(set().union(*parts))
