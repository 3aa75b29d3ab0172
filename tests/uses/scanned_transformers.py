"""A tiny scanned transformer, written as Gemma writes it: function, shapes of parameters, groups.

Of each group of channels there are the number of channels, that of parameters, and whether it is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np

WORDS, WIDTH, HEADS, SHARED, HEAD, HIDDEN, LAYERS = 12, 8, 4, 2, 4, 16, 2
IDS = np.random.default_rng(0).integers(0, WORDS, (3, 6))


def attend(query, key, value):
    """Causal attention in which neighbouring heads of queries share a head of keys and values."""
    batch, time, heads, features = query.shape
    shared = key.shape[2]
    query = query.reshape(batch, time, shared, heads // shared, features)
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


def scan_layers(block, x, params):
    """Runs blocks whose parameters are stacked."""
    stacked = {
        name.removeprefix('layers/'): leaf
        for name, leaf in params.items()
        if name.startswith('layers/')
    }
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked)[0]


def gemma(params, ids):
    def block(p, x):
        h = rms_norm(x, 1 + p['pre_attention_norm/scale'])
        query = jnp.einsum('btd,ndh->btnh', h, p['attn/q_einsum/w'])
        key, value = jnp.einsum('bsd,ckdh->cbskh', h, p['attn/kv_einsum/w'])
        mixed = attend(rotate(query), rotate(key), value)
        x = x + jnp.einsum('btnh,nhd->btd', mixed, p['attn/attn_vec_einsum/w'])
        h = rms_norm(x, 1 + p['pre_ffw_norm/scale'])
        gate, up = jnp.einsum('btd,cfd->cbtf', h, p['mlp/gating_einsum'])
        return x + jnp.einsum('btf,fd->btd', jax.nn.gelu(gate) * up, p['mlp/linear'])

    x = params['embedder'][ids] * jnp.sqrt(WIDTH)
    x = rms_norm(scan_layers(block, x, params), 1 + params['final_norm/scale'])
    return x @ params['embedder'].T


def _stacked(shapes):
    return {f'layers/{name}': (LAYERS, *shape) for name, shape in shapes.items()}


MODELS = {
    'gemma': (
        gemma,
        {
            'embedder': (WORDS, WIDTH),
            'final_norm/scale': (WIDTH,),
            **_stacked(
                {
                    'attn/q_einsum/w': (HEADS, WIDTH, HEAD),
                    'attn/kv_einsum/w': (2, SHARED, WIDTH, HEAD),
                    'attn/attn_vec_einsum/w': (HEADS, HEAD, WIDTH),
                    'mlp/gating_einsum': (2, HIDDEN, WIDTH),
                    'mlp/linear': (HIDDEN, WIDTH),
                    'pre_attention_norm/scale': (WIDTH,),
                    'pre_ffw_norm/scale': (WIDTH,),
                }
            ),
        },
        # heads that share keys, heads in such a group, rotated pairs of features, hidden units, width, layers
        [
            (2, 512, True),
            (2, 768, True),
            (2, 768, True),
            (2, 1568, True),
            (8, 1672, True),
            (16, 768, True),
        ],
    ),
}
