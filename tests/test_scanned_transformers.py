"""A tiny scanned transformer, written as Gemma writes it: one-shot pruning, channels, compiled weights."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner import sparse
from jaxpruner.structure import channel_groups

WORDS, WIDTH, HEADS, SHARED, HEAD, HIDDEN, LAYERS = 12, 8, 4, 2, 4, 16, 2
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, WORDS, (3, 6))
SHAPES = {
    'embedder': (WORDS, WIDTH),
    'final_norm/scale': (WIDTH,),
    'layers/attn/q_einsum/w': (LAYERS, HEADS, WIDTH, HEAD),
    'layers/attn/kv_einsum/w': (LAYERS, 2, SHARED, WIDTH, HEAD),
    'layers/attn/attn_vec_einsum/w': (LAYERS, HEADS, HEAD, WIDTH),
    'layers/mlp/gating_einsum': (LAYERS, 2, HIDDEN, WIDTH),
    'layers/mlp/linear': (LAYERS, HIDDEN, WIDTH),
    'layers/pre_attention_norm/scale': (LAYERS, WIDTH),
    'layers/pre_ffw_norm/scale': (LAYERS, WIDTH),
}
PARAMS = {
    name: jnp.asarray(RNG.normal(size=shape) / 3, jnp.float32) for name, shape in SHAPES.items()
}
KERNELS = {name for name in SHAPES if not name.endswith(('scale', 'embedder'))}
# Sizes and parameters: heads that share keys, heads in such a group, rotated pairs, hidden units, width, layers.
GROUPS = [(2, 512), (2, 768), (2, 768), (2, 1568), (8, 1672), (16, 768)]


def attend(query, key, value):
    """Causal attention in which neighbouring heads of queries share a head of keys and values."""
    batch, time, heads, features = query.shape
    query = query.reshape(batch, time, SHARED, heads // SHARED, features)
    logits = jnp.einsum('btkgh,bskh->bkgts', query * features**-0.5, key)
    logits = jnp.where(jnp.tril(jnp.ones((time, time), bool)), logits, -1e30)
    mixed = jnp.einsum('bkgts,bskh->btkgh', jax.nn.softmax(logits, -1), value)
    return mixed.reshape(batch, time, heads, features)


def rotate(x):
    """Rotary positions of (batch, time, heads, features)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def gemma(params, ids):
    def block(x, p):
        h = rms_norm(x, 1 + p['layers/pre_attention_norm/scale'])
        query = jnp.einsum('btd,ndh->btnh', h, p['layers/attn/q_einsum/w'])
        key, value = jnp.einsum('bsd,ckdh->cbskh', h, p['layers/attn/kv_einsum/w'])
        mixed = attend(rotate(query), rotate(key), value)
        x = x + jnp.einsum('btnh,nhd->btd', mixed, p['layers/attn/attn_vec_einsum/w'])
        h = rms_norm(x, 1 + p['layers/pre_ffw_norm/scale'])
        gate, up = jnp.einsum('btd,cfd->cbtf', h, p['layers/mlp/gating_einsum'])
        x = x + jnp.einsum('btf,fd->btd', jax.nn.gelu(gate) * up, p['layers/mlp/linear'])
        return x, None

    layers = {name: leaf for name, leaf in params.items() if name.startswith('layers/')}
    x, _ = jax.lax.scan(block, params['embedder'][ids] * jnp.sqrt(WIDTH), layers)
    return rms_norm(x, 1 + params['final_norm/scale']) @ params['embedder'].T


def test_wanda_prunes_each_kernel_along_its_inputs():
    given = {'sparsity_type': '2:4', 'apply_fn': gemma, 'batches': [IDS]}
    pruned, masks = jaxpruner.prune(PARAMS, None, 'wanda', **given)
    assert {name for name, mask in masks.items() if mask is not None} == KERNELS
    for name in KERNELS:
        assert int(masks[name].sum()) * 2 == PARAMS[name].size, name
        np.testing.assert_array_equal(pruned[name], PARAMS[name] * masks[name])


def test_channels_are_removed_and_what_is_left_is_compiled():
    graph = channel_groups(gemma, PARAMS, IDS)
    groups = graph.groups.values()
    assert sorted((each.size, each.parameters) for each in groups) == GROUPS
    assert all(each.exact for each in groups)
    keep = {each.name: list(range(each.size // 2)) for each in groups}
    assert graph.verify(PARAMS, keep, IDS).verdict == 'equal'
    zeroed = graph.zeroed(PARAMS, {e.name: keep[e.name] for e in groups if not e.is_depth})
    sparse_fn, packed, report = sparse.compile(gemma, zeroed, IDS, formats='smaller')
    assert {name: layer.format for name, layer in report.layers.items()} == dict.fromkeys(
        KERNELS, 'smaller'
    )
    expected = jax.jit(gemma)(zeroed, jnp.asarray(IDS))
    np.testing.assert_allclose(sparse_fn(packed, IDS), expected, atol=1e-5)
