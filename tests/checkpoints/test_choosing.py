"""Which leaves of a checkpoint are pruned, and how: by settings, names and ranks."""

import re

import ml_dtypes
import numpy as np
import pytest

from jaxpruner import sparsity_types
from jaxpruner.checkpoints import Choice, Leaf, choose

LEAVES = {
    'z.weight': Leaf((16, 8), np.dtype(ml_dtypes.bfloat16)),
    'a.weight': Leaf((8, 8), np.dtype('float16')),
    'a.bias': Leaf((8,), np.dtype('float32')),
    'ids': Leaf((4, 4), np.dtype('int64')),
    'fp8': Leaf((4, 4), np.dtype(ml_dtypes.float8_e4m3fn)),
    'wide': Leaf((4, 4), np.dtype('float64')),
}


def pruned_of(choices):
    return {name: choice for name, choice in choices.items() if isinstance(choice, Choice)}


ANY = 'unstructured'
CHOSEN = [  # sparsity, types, what is pruned
    (0.5, [], {'z.weight': ANY, 'a.weight': ANY, 'wide': ANY}),
    (0.5, [('a.bias', ANY), ('w*', ANY), ('*', 'dense')], {'a.bias': ANY, 'wide': ANY}),
    (0.5, [('*.weight', 'dense')], {'wide': ANY}),
    (None, [('wide', '1:4'), ('a.*', 'dense'), ('*', '2:4')], {'z.weight': '2:4', 'wide': '1:4'}),
]


@pytest.mark.parametrize(('sparsity', 'types', 'kinds'), CHOSEN)
def test_leaves_are_chosen_by_name(sparsity, types, kinds):
    choices = choose(LEAVES, sparsity, types)
    assert {name: choice.kind for name, choice in pruned_of(choices).items()} == {
        name: sparsity_types.parse_sparsity_type(kind) for name, kind in kinds.items()
    }
    assert list(choices) == list(LEAVES)


LOOKED_UP = [
    'model.embed_tokens.weight',  # Llama
    'bert.embeddings.word_embeddings.weight',
    'transformer.wte.weight',
    'wpe/embedding',
    'shared.weight',  # T5
    'params/embedder/input_embedding/value',
    'gpt/~/embed/embeddings',
    'pos_embed',
    'block.0.relative_attention_bias.weight',  # T5
    'embeddings.cls_token',
]
VECTORS = ['h_0.attn.key.bias', 'layers/norm/scale', 'block/beta/value']
HEADS = [
    'lm_head.weight',
    'lm_head/kernel',
    'embed_out.weight',  # GPT-NeoX
    'output.weight',  # Llama
    'params/output_head/kernel/value',
    'decoder/logits_dense/kernel',
    'cls.predictions.decoder.weight',
]
LAYERS = [
    'encoder/layer/0/attention/output/dense/kernel',
    'layers.3.attention.output.weight',
    'embedding/kernel',  # of patches
    'time_emb_proj.weight',
    'members.w',
    'head.weight',
    'decoder.weight',
]
SHAPE = Leaf((8, 16), np.dtype('float32'))
WITH_TABLES = dict.fromkeys([*LOOKED_UP, *VECTORS, *HEADS, *LAYERS], SHAPE) | {
    'patch_embed.weight': Leaf((8, 4, 4, 4), SHAPE.dtype)  # a convolution
}


HEADLESS = [*LAYERS[:-2], 'decoder.weight', 'patch_embed.weight', 'pos_embed']
NAMED = [
    (0.5, [], [*LAYERS, 'patch_embed.weight']),
    (None, [('*', '2:4')], WITH_TABLES),
    (None, [('pos*', '1:4'), (None, '2:4'), ('*head*', 'dense')], HEADLESS),
    (0.5, [('lm_head*', ANY), ('members*', ANY), ('*', 'dense')], [*HEADS[:2], 'members.w']),
]


@pytest.mark.parametrize(('sparsity', 'types', 'pruned'), NAMED)
def test_what_looks_like_an_embedding_or_a_head_is_pruned_where_a_glob_names_it(
    sparsity, types, pruned
):
    reasons = choose(WITH_TABLES, sparsity, types)
    assert set(pruned_of(reasons)) == set(pruned)
    if not types:
        assert {reasons[name] for name in LOOKED_UP} == {'looks like an embedding'}
        assert {reasons[name] for name in HEADS} == {'looks like an output head'}


REFUSED = [
    (1.5, [], 'sparsity must lie in [0, 1] (the share of weights removed), got 1.5'),
    (None, [], 'sparsity: z.weight needs one; only N:M'),
    (0.5, [('*.kernel', ANY)], "types: '*.kernel' matches no parameter; the nearest are"),
    (0.5, [('*', '2-4')], "unknown sparsity type '2-4'; write"),
    (0.5, [('*', '2:4'), ('*', '1:4')], 'types: a name is given twice'),
    (None, [('*', '2:5')], 'z.weight: shape (16, 8) has length 8 along axis -1, which m=5'),
    (0.5, [('ids', ANY)], 'types: ids is int64, which is not pruned; float16, bfloat16'),
    (0.5, [('*', 'dense')], 'no leaf is left to prune'),
]


@pytest.mark.parametrize(('sparsity', 'types', 'words'), REFUSED)
def test_wrong_choices_are_refused(sparsity, types, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        choose(LEAVES, sparsity, types)
