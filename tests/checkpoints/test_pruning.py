"""Pruning in parts gives what the library gives for whole arrays, and leaves the rest as it is."""

import json
import re
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

from jaxpruner import mask_calculator, selection, sparsity_distributions, sparsity_types
from jaxpruner.checkpoints import (
    Leaf,
    choose,
    leaf_masks,
    left_out,
    open_checkpoint,
    prune,
    write_safetensors,
)
from jaxpruner.checkpoints.ranking_in_parts import Verdicts, threshold
from jaxpruner.checkpoints.safetensors_reader import INDEX_NAME

RNG = np.random.default_rng(0)
BFLOAT16 = ml_dtypes.bfloat16


def normal(shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


class InMemory:
    """Arrays as a checkpoint."""

    def __init__(self, **arrays):
        self.arrays, self.metadata, self.path = arrays, {}, 'memory'
        self.leaves = {name: Leaf(array.shape, array.dtype) for name, array in arrays.items()}

    def read(self, name, part=None):
        array = self.arrays[name]
        return (
            array.copy()
            if part is None
            else array.reshape(-1)[part.start :][: part.size].reshape(part.shape).copy()
        )


def pruned_in_parts(array, kind, sparsity, part_size):
    kind = sparsity_types.parse_sparsity_type(kind)
    parts = list(leaf_masks.prune_leaf(InMemory(w=array), 'w', kind, sparsity, part_size=part_size))
    weights = np.concatenate([part.weights.reshape(-1) for part in parts]).reshape(array.shape)
    return weights, np.concatenate([part.mask.reshape(-1) for part in parts]).reshape(array.shape)


@pytest.mark.parametrize(
    ('kind', 'shape', 'dtype'),
    [
        ('unstructured', (12, 10), np.float16),
        ('unstructured', (12, 10), BFLOAT16),
        ('unstructured', (3, 5, 4), np.float32),
        ('unstructured', (9, 7), np.float64),
        ('unstructured', (), np.float32),
        ('unstructured', (0, 4), np.float32),
        ('2:4', (6, 12), BFLOAT16),
        ('nm_1,4,0', (12, 6), np.float16),
        ('nm_1,2,1', (3, 8, 5), np.float64),
        ('2:4', (40,), np.float32),
        ('2:4', (0, 4), np.float32),
        ('block_2,3', (11, 10), BFLOAT16),
        ('block_2,2', (3, 5, 6), np.float32),
        ('block_2,4', (21,), np.float64),
        ('block_2,2', (2, 0), np.float32),
        ('channel_0', (12, 5), BFLOAT16),
        ('channel_-1', (4, 6, 5), np.float32),
        ('channel_1', (4, 6, 5), np.float64),
        ('channel_0', (0, 5), np.float32),
    ],
)
def test_masks_are_those_of_the_library(kind, shape, dtype):
    array = np.asarray(normal(shape)).astype(dtype)
    for sparsity, part_size in ((0.0, 7), (0.4, 7), (0.4, 10_000), (1.0, 64)):
        weights, mask = pruned_in_parts(array, kind, sparsity, part_size)
        with jax.enable_x64(True) if hasattr(jax, 'enable_x64') else jax.experimental.enable_x64():
            expected = np.asarray(mask_calculator.get_topk_fn(kind)(np.abs(array), sparsity))
        np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(
            weights, np.where(expected, array, np.zeros((), dtype)), strict=True
        )


class RowRelative(sparsity_types.Unstructured):
    """Ranks weights against the sum of their row."""

    def group_scores(self, scores):
        return scores / scores.sum(axis=-1, keepdims=True)


class ByLargest(sparsity_types.Channel):
    """Ranks channels by their largest weight."""

    def group_scores(self, scores):
        return scores.max(axis=0)


@pytest.mark.parametrize(
    'sparsity_type', [RowRelative(), ByLargest(-1), sparsity_types.NByM(2, 4, axis=(1, 0))]
)
def test_masks_of_a_type_that_is_ranked_whole_are_those_of_the_library(sparsity_type):
    array = normal((6, 8)) * np.array([[1], [100]] * 3, np.float32)
    array[0, -1] = 1000
    parts = leaf_masks.prune_leaf(InMemory(w=array), 'w', sparsity_type, 0.5, part_size=16)
    mask = np.concatenate([part.mask.reshape(-1) for part in parts]).reshape(array.shape)
    topk_fn = mask_calculator.get_topk_fn(sparsity_type)
    np.testing.assert_array_equal(mask, topk_fn(np.abs(array), 0.5))


FLOATS = st.sampled_from([0.0, -0.0, 1.0, 1.5, 2.0, 1e-7, float('nan'), float('inf')])


@hypothesis.given(
    st.lists(FLOATS, min_size=24, max_size=24),  # one shape, one compilation
    st.integers(1, 25),
    st.integers(1, 10),
    st.sampled_from([np.float16, BFLOAT16, np.float32]),
)
def test_ranking_in_parts_is_the_selection(values, count, length, dtype):
    scores = np.abs(np.array(values, dtype))
    parts = [scores[i : i + length] for i in range(0, len(scores), length)]
    verdicts = Verdicts(threshold(lambda: parts, count, len(scores)))
    found = np.concatenate([verdicts.of(part) for part in parts])
    np.testing.assert_array_equal(found, np.asarray(selection.keep_largest(scores, count)))


def test_float64_is_ranked_in_64_bits():
    array = 1 + np.arange(8) * 1e-12
    _, mask = pruned_in_parts(array, 'unstructured', 0.5, 3)
    assert mask.tolist() == [0] * 4 + [1] * 4
    _, mask = pruned_in_parts(array[::-1].copy(), '2:4', 0.5, 4)
    assert mask.tolist() == [1, 1, 0, 0] * 2


def test_random_scores_depend_on_name_and_seed():
    def mask(name, seed):
        score = leaf_masks.random_scores(name, seed)
        checkpoint = InMemory(**{name: np.ones((10, 10), BFLOAT16)})
        parts = leaf_masks.prune_leaf(
            checkpoint, name, sparsity_types.Unstructured(), 0.7, score, part_size=30
        )
        return np.concatenate([part.mask for part in parts])

    assert mask('a', 8).sum() == 30
    np.testing.assert_array_equal(mask('a', 8), mask('a', 8))
    assert (mask('a', 8) != mask('a', 9)).any()
    assert (mask('a', 8) != mask('b', 8)).any()


TENSORS = {
    'z.weight': normal((16, 8), BFLOAT16),
    'a.weight': normal((8, 8), np.float16),
    'a.bias': normal(8),
    'ids': RNG.integers(0, 9, (4, 4)),
    'fp8': normal((4, 4)).astype(ml_dtypes.float8_e4m3fn),
    'wide': normal((4, 4), np.float64),
}
LEAVES = {name: Leaf(array.shape, array.dtype) for name, array in TENSORS.items()}


@pytest.fixture
def dense(tmp_path):
    write_safetensors(tmp_path / 'dense.safetensors', TENSORS, {'format': 'pt', 'ä': 'ö'})
    return open_checkpoint(tmp_path / 'dense.safetensors')


def test_prunes_floats_of_more_than_one_dimension_and_nothing_else(dense, tmp_path):
    kept = prune(
        dense,
        tmp_path / 'out',
        choose(dense.leaves, 0.5),
        masks_out=tmp_path / 'masks',
        part_size=20,
    )
    assert [(leaf.name, leaf.size, leaf.kept) for leaf in kept] == [
        ('z.weight', 128, 64),
        ('a.weight', 64, 32),
        ('wide', 16, 8),
    ]
    out, masks = open_checkpoint(tmp_path / 'out'), open_checkpoint(tmp_path / 'masks')
    assert (out.metadata, out.leaves) == (dense.metadata, dense.leaves)
    assert list(out.leaves) == list(dense.leaves)
    length = len((tmp_path / 'out').read_bytes())
    assert length == len(dense.path.read_bytes())
    assert list(masks.leaves) == ['z.weight', 'a.weight', 'wide']
    for name, array in TENSORS.items():
        mask = masks.read(name) if name in masks.leaves else np.ones(array.shape, np.uint8)
        assert (
            out.read(name).tobytes() == np.where(mask, array, np.zeros((), array.dtype)).tobytes()
        )
    with safetensors.safe_open(tmp_path / 'out', 'numpy') as opened:
        assert opened.metadata() == dict(dense.metadata)
    assert sorted(file.name for file in tmp_path.iterdir()) == ['dense.safetensors', 'masks', 'out']


def test_shards_become_shards(tmp_path):
    folder = tmp_path / 'dense'
    folder.mkdir()
    write_safetensors(folder / 'one.safetensors', {'a': TENSORS['a.weight']}, {'shard': '1'})
    write_safetensors(folder / 'two.safetensors', {'b': TENSORS['z.weight'], 'c': TENSORS['ids']})
    weight_map = {'a': 'one.safetensors', 'b': 'two.safetensors', 'c': 'two.safetensors'}
    (folder / INDEX_NAME).write_text(json.dumps({'weight_map': weight_map}))
    dense = open_checkpoint(folder)
    prune(dense, tmp_path / 'out', choose(dense.leaves, 0.75), masks_out=tmp_path / 'masks')
    out = open_checkpoint(tmp_path / 'out')
    assert out.leaves == dense.leaves
    assert {name: np.count_nonzero(out.read(name).astype(float)) for name in 'ab'} == {
        'a': 16,
        'b': 32,
    }
    assert list(open_checkpoint(tmp_path / 'masks').leaves) == ['a', 'b']
    with pytest.raises(FileExistsError, match=r'out exists; choose another name$'):
        prune(dense, tmp_path / 'out', choose(dense.leaves, 0.75), overwrite=True)


def test_sharded_leaves_nothing_behind(tmp_path):
    folder = tmp_path / 'dense'
    folder.mkdir()
    write_safetensors(folder / 'one.safetensors', {'a': TENSORS['a.weight']})
    (folder / INDEX_NAME).write_text(json.dumps({'weight_map': {'a': 'one.safetensors'}}))
    dense = open_checkpoint(folder)
    with pytest.raises(KeyboardInterrupt):
        prune(dense, tmp_path / 'out', choose(dense.leaves, 0.5), on_leaf=interrupt)
    assert [file.name for file in tmp_path.iterdir()] == ['dense']


def interrupt(name, leaf):
    raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing_behind(dense, tmp_path):
    def interrupt_late(name, leaf):
        if name == 'fp8':
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(
            dense,
            tmp_path / 'out',
            choose(dense.leaves, 0.5),
            masks_out=tmp_path / 'masks',
            on_leaf=interrupt_late,
        )
    assert [file.name for file in tmp_path.iterdir()] == ['dense.safetensors']


def test_a_file_may_be_pruned_in_its_place(dense):
    with pytest.raises(
        FileExistsError, match=r'dense\.safetensors exists; choose another name, or overwrite'
    ):
        prune(dense, dense.path, choose(dense.leaves, 0.5))
    prune(dense, dense.path, choose(dense.leaves, 0.5), overwrite=True)
    assert np.count_nonzero(open_checkpoint(dense.path).read('wide')) == 8


def test_wrong_places_are_refused(dense, tmp_path):
    choices = choose(dense.leaves, 0.5)
    with pytest.raises(FileNotFoundError, match=r'there is no folder .*missing'):
        prune(dense, tmp_path / 'missing' / 'out', choices)
    (tmp_path / 'link').symlink_to(tmp_path / 'out')
    for masks in (tmp_path / 'out', tmp_path / '..' / tmp_path.name / 'out', tmp_path / 'link'):
        with pytest.raises(ValueError, match='masks_out and out are the same file'):
            prune(dense, tmp_path / 'out', choices, masks_out=masks)
    with pytest.raises(
        ValueError, match=r"scores: 'saliency' is unknown; use 'magnitude' or 'random'; .*apply_fn="
    ):
        prune(dense, tmp_path / 'out', choices, scores='saliency')


def test_erk_shares_the_budget_among_what_is_pruned():
    choices = choose(LEAVES, 0.5, 'erk', skip=['wide'])
    shapes = {name: np.ones(LEAVES[name].shape, np.float32) for name in ('z.weight', 'a.weight')}
    expected = sparsity_distributions.erk(shapes, 0.5)
    assert {name: choice.sparsity for name, choice in choices.items()} == expected


@pytest.mark.parametrize(
    ('settings', 'kinds'),
    [
        (
            {'sparsity': 0.5},
            {'z.weight': 'unstructured', 'a.weight': 'unstructured', 'wide': 'unstructured'},
        ),
        ({'sparsity': 0.5, 'only': ['a.*']}, {'a.weight': 'unstructured'}),
        (
            {'sparsity': 0.5, 'only': ['a.bias', 'w*']},
            {'a.bias': 'unstructured', 'wide': 'unstructured'},
        ),
        ({'sparsity': 0.5, 'skip': ['*.weight']}, {'wide': 'unstructured'}),
        (
            {'types': [('wide', '1:4'), ('*', '2:4')]},
            {'z.weight': '2:4', 'a.weight': '2:4', 'wide': '1:4'},
        ),
        ({'types': [('a.*', 'dense'), ('*', '2:4')]}, {'z.weight': '2:4', 'wide': '2:4'}),
        ({'types': [('ids', 'dense'), ('*', '2:4')], 'only': ['wide']}, {'wide': '2:4'}),
    ],
)
def test_leaves_are_chosen_by_name(settings, kinds):
    choices = choose(LEAVES, **settings)
    assert {name: choice.kind for name, choice in choices.items()} == {
        name: sparsity_types.parse_sparsity_type(kind) for name, kind in kinds.items()
    }
    assert list(choices) == [name for name in LEAVES if name in choices]


LOOKED_UP = [
    'model.embed_tokens.weight',  # Llama
    'tok_embeddings.weight',
    'bert.embeddings.word_embeddings.weight',
    'transformer.wte.weight',
    'wpe/embedding',
    'shared.weight',  # T5
    'token_embedder/embedding',  # MaxText
    'params/embedder/input_embedding/value',
    'gpt/~/embed/embeddings',
    'pos_embed',
    'block.0.relative_attention_bias.weight',  # T5
    'embeddings.cls_token',
]
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
    'model.layers.0.mlp.up_proj.weight',
    'encoder/layer/0/attention/output/dense/kernel',
    'layers.3.attention.output.weight',
    'embedding/kernel',  # of patches
    'time_embedding.linear_1.weight',
    'time_emb_proj.weight',
    'members.w',
    'head.weight',
    'decoder.weight',
]
SHAPE = Leaf((8, 16), np.dtype('float32'))
WITH_TABLES = dict.fromkeys([*LOOKED_UP, *HEADS, *LAYERS], SHAPE) | {
    'patch_embed.weight': Leaf((8, 4, 4, 4), SHAPE.dtype)  # a convolution
}


@pytest.mark.parametrize(
    ('settings', 'pruned'),
    [
        ({'sparsity': 0.5}, [*LAYERS, 'patch_embed.weight']),
        ({'sparsity': 0.5, 'distribution': 'erk'}, [*LAYERS, 'patch_embed.weight']),
        ({'types': [(None, '2:4')]}, [*LAYERS, 'patch_embed.weight']),
        ({'types': [('*', '2:4')]}, WITH_TABLES),
        (
            {'types': [('pos*', '1:4'), (None, '2:4'), ('*head*', 'dense')]},
            [*LAYERS[:-2], 'decoder.weight', 'patch_embed.weight', 'pos_embed'],
        ),
        ({'sparsity': 0.5, 'only': ['lm_head*', 'members*']}, [*HEADS[:2], 'members.w']),
        (
            {'sparsity': 0.5, 'types': [('wpe*', 'unstructured')], 'only': ['wpe*']},
            ['wpe/embedding'],
        ),
    ],
)
def test_what_looks_like_an_embedding_or_a_head_is_pruned_where_a_glob_names_it(settings, pruned):
    assert set(choose(WITH_TABLES, **settings)) == set(pruned)
    reasons = left_out(
        WITH_TABLES, **{key: settings[key] for key in settings if key in ('types', 'only')}
    )
    assert reasons.keys() == WITH_TABLES.keys() - set(pruned)
    if settings == {'sparsity': 0.5}:
        assert {reasons[name] for name in LOOKED_UP} == {'looks like an embedding'}
        assert {reasons[name] for name in HEADS} == {'looks like an output head'}


def test_a_checkpoint_of_embeddings_alone_is_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match=r'an embedding or an output head .* a glob in only or typ'
    ):
        choose({'wte': SHAPE}, 0.5)


@pytest.mark.parametrize(
    ('sparsity', 'types', 'is_told'),
    [
        (0.9, [('*', '2:4')], True),
        (0.5, [('*', '2:4')], False),
        (0.75, [('wide', '1:4'), ('*', '2:4')], False),
        (0.9, [('wide', '2:4')], False),  # for the others
        (0.0, [('*', '2:4')], False),  # everything stays dense
    ],
)
def test_a_sparsity_that_holds_for_no_leaf_is_told(sparsity, types, is_told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        choose(LEAVES, sparsity, types=types)
    assert [str(warning.message).split(' (')[0] for warning in caught] == is_told * [
        'sparsity 0.9 has no effect: all leaves are pruned to N:M, which removes a share of its own'
    ]


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        ({'sparsity': 1.5}, r'sparsity must lie in [0, 1] (the share of weights removed), got 1.5'),
        ({'sparsity': 80.0}, r'80.0 per cent is 0.8'),
        (
            {'sparsity': 0.5, 'distribution': 'er'},
            "distribution: 'er' is unknown; did you mean 'erk'?",
        ),
        (
            {'sparsity': 0.5, 'only': ['*.kernel']},
            "only: '*.kernel' matches no parameter; the nearest are",
        ),
        ({'sparsity': 0.5, 'skip': ['b']}, "skip: 'b' matches no parameter"),
        ({'sparsity': 0.5, 'types': [('c', '2:4')]}, "types: 'c' matches no parameter"),
        ({'sparsity': 0.5, 'types': [('*', '2-4')]}, "unknown sparsity type '2-4'; write"),
        (
            {'sparsity': 0.5, 'types': [('*', '2:4'), ('wide', '1:4')]},
            "types: 'wide' is never used",
        ),
        ({'sparsity': 0.5, 'types': [('*', '2:4'), ('*', '1:4')]}, "types: '*' is given twice"),
        (
            {'types': [('*', '2:5')]},
            'z.weight: shape (16, 8) has length 8 along axis -1, which m=5 does not divide',
        ),
        ({'types': [('*', '2:5')]}, "leave them dense: skip=['z.weight', "),
        ({}, 'sparsity: z.weight needs one, since its type is unstructured'),
        (
            {'sparsity': 0.5, 'only': ['ids']},
            'only: ids is int64, which is not pruned; float16, bfloat16, float32',
        ),
        ({'sparsity': 0.5, 'only': ['fp8']}, 'only: fp8 is float8_e4m3fn, which is not pruned'),
        ({'types': [('fp8', '2:4')]}, 'types: fp8 is float8_e4m3fn, which is not pruned'),
        ({'sparsity': 0.5, 'skip': ['*']}, 'no leaf is left to prune'),
    ],
)
def test_wrong_choices_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        choose(LEAVES, **settings)
