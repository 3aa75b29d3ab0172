"""Masks as images and animations, and along which axes they are N:M."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import PIL.Image
import pytest

import jaxpruner
from jaxpruner.report import animate_masks, masks, n_by_m_axes, plot_masks


def picture(mask, **settings):
    """What is drawn of one mask, NaN in the gaps, and the title above it."""
    (axes,) = plot_masks({'w': mask}, **settings).axes
    return np.asarray(axes.images[0].get_array().filled(np.nan)), axes.get_title()


def test_a_convolution_has_its_outputs_across():
    mask = np.random.default_rng(0).integers(0, 2, (3, 2, 4, 5), np.uint8)
    np.testing.assert_array_equal(picture(mask)[0], mask.reshape(24, 5))


SHAPES = {'conv': (3, 3, 2, 4), 'dense': (6, 16), 'scale': (5,), 'bias': (5,)}
KEYS = dict(zip(SHAPES, jax.random.split(jax.random.key(0), 4), strict=True))
PARAMS = {name: jax.random.normal(KEYS[name], shape) for name, shape in SHAPES.items()}
MASKS = {name: np.asarray(PARAMS[name] > 0, np.uint8) for name in ('conv', 'dense', 'scale')}
MASKS['bias'] = None


def make_state(is_packed):
    pruner = jaxpruner.FixedMask(MASKS, use_packed_masks=is_packed)
    return optax.MultiSteps(pruner.wrap_optax(optax.sgd(1.0)), 2).init(PARAMS)


SOURCES = {
    'masks': lambda: plot_masks(MASKS),
    'state': lambda: plot_masks(make_state(False)),
    'packed state': lambda: plot_masks(make_state(True), params=jax.eval_shape(lambda: PARAMS)),
}


@pytest.mark.parametrize('draw', SOURCES.values(), ids=SOURCES)
def test_each_masked_leaf_is_drawn(draw):
    panels = {axes.get_title().split('\n')[0]: axes for axes in draw().axes if axes.images}
    assert panels.keys() == {'conv', 'dense', 'scale'}
    for name, axes in panels.items():
        drawn = np.asarray(axes.images[0].get_array().filled(np.nan))
        np.testing.assert_array_equal(drawn, picture(MASKS[name])[0])


def test_leaves_are_chosen_titles_count_and_the_image_is_written_whole(tmp_path):
    tree = {'w': jnp.array([[1, 0], [0, 0]], jnp.uint8), 'v': jnp.ones(4, jnp.uint8)}
    path = tmp_path / 'new' / 'masks.png'
    others = {'none': np.ones((0, 4), np.uint8), 'x': np.uint8(1)}
    figure = plot_masks(tree | others, str(path), leaves=['w', 'v'])
    assert figure.get_suptitle().startswith('37.5% pruned')
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ['v\n4, 4 of 4 kept', 'w\n2×2, 1 of 4 kept']
    assert [file.name for file in path.parent.iterdir()] == [path.name]


REFUSED = {
    'nothing masked': (lambda: plot_masks({'w': None}), '0 masks with weights to draw'),
    'packed without parameters': (lambda: plot_masks(make_state(True)), 'give params='),
    'a name of nothing': (lambda: plot_masks(MASKS, leaves='dens'), "leaves: 'dens' matches no"),
    'another ending': (lambda: plot_masks(MASKS, 'a.txt'), r'a\.txt.*\.png'),
    'too many': (
        lambda: plot_masks({str(n): np.ones(2, np.uint8) for n in range(41)}),
        "41 masks.*1 to 40.*leaves='0'",
    ),
}


@pytest.mark.parametrize(('draw', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


NAME = 'magnitude_0.8_0'


def write_masks(folder, **arrays):
    (folder / 'masks').mkdir()
    np.savez(folder / 'masks' / f'{NAME}.npz', **arrays)


def make_masks(number, *shape):
    random = np.random.default_rng(0).random((1, *shape))
    return (random > np.linspace(0, 0.8, number).reshape(-1, *[1] * len(shape))).astype(np.uint8)


@pytest.mark.parametrize(('steps', 'frames'), [(1, 1), (20, 6)])
def test_a_gif_with_a_picture_for_each_step(tmp_path, monkeypatch, steps, frames):
    monkeypatch.setattr(masks, '_MOST_FRAMES', 6)
    arrays = {'steps': np.arange(steps) * 10, 'conv/kernel': make_masks(steps, 3, 3, 4, 8)}
    write_masks(tmp_path, **arrays, **{'head/kernel': make_masks(steps, 32, 10)})
    path = tmp_path / 'images' / 'masks.gif'
    animate_masks(tmp_path, NAME, path)
    assert [file.name for file in path.parent.iterdir()] == ['masks.gif']
    with PIL.Image.open(path) as image:
        assert image.format == 'GIF'
        assert getattr(image, 'n_frames', 1) == frames  # the last is held, which is no picture more
        dark = []
        for number in (0, frames - 1):
            image.seek(number)
            dark.append(np.mean(np.asarray(image.convert('L')) < 128))
    assert dark[0] > 0.2
    assert (dark[-1] < 0.5 * dark[0]) == (frames > 1)  # pruned weights are light


def test_other_files_are_refused_by_name(tmp_path):
    write_masks(tmp_path, steps=np.arange(2), kernel=make_masks(3, 3, 4))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf'{NAME}.npz is no file of masks: '):
            animate_masks(tmp_path, NAME, tmp_path / 'a.gif')
        (tmp_path / 'masks' / f'{NAME}.npz').write_bytes(b'PK\x03\x04cut')


WEIGHTS = np.random.default_rng(0).normal(size=(8, 12, 16)).astype(np.float32)


@pytest.mark.parametrize(('n', 'axes'), [(1, (1,)), (3, ())])  # sparser and denser than asked
def test_the_axes_of_n_by_m_are_those_of_the_type(n, axes):
    params = {'layer': {'kernel': jnp.asarray(WEIGHTS), 'bias': jnp.ones(16)}}
    sparsity_type = jaxpruner.NByM(n, 4, axis=1)
    pruned = jaxpruner.MagnitudePruning(sparsity_type=sparsity_type).instant_sparsify(params)
    for tree in pruned:  # parameters and masks
        assert n_by_m_axes(tree, 2, 4)['layer/kernel'] == axes
    assert n_by_m_axes(pruned[0], 2, 4)['layer/bias'] == ()


def test_axes_that_no_m_divides_are_taken_as_one_and_zeros_fit_any_other():
    leaf = np.ones((2, 6, 3))
    leaf.reshape(12, 3)[::2] = 0
    trees = {'a': leaf, 'number': jnp.float32(1), 'zeros': jnp.zeros((4, 6, 8), jnp.bfloat16)}
    assert n_by_m_axes(trees) == {'a': ((0, 1),), 'number': (), 'zeros': (0, 2)}
    with pytest.raises(ValueError, match=r'a/kernel .*unpack_masks'):
        n_by_m_axes({'a': {'kernel': np.full((2, 2), 170, np.uint8)}})
    with pytest.raises(ValueError, match='n=5, m=4'):
        n_by_m_axes({}, 5, 4)
