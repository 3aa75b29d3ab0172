"""Masks as images: how a mask is laid out, what is drawn of a state or a tree of masks, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.report import mask_images, plot_masks
from jaxpruner.report.mask_images import lay_out


def test_a_convolution_is_a_grid_of_filters():
    mask = np.random.default_rng(0).integers(0, 2, (3, 2, 4, 5), np.uint8)
    picture = lay_out(mask)
    assert picture.shape == (4 * 4 - 1, 5 * 3 - 1)
    for row in range(4):
        for column in range(5):
            tile = picture[4 * row : 4 * row + 3, 3 * column : 3 * column + 2]
            np.testing.assert_array_equal(tile, mask[:, :, row, column])
    assert np.isnan(picture[3]).all()
    assert np.isnan(picture[:, 2]).all()


@pytest.mark.parametrize(
    ('shape', 'expected'),
    [
        ((3, 3, 1, 16), (15, 15)),
        ((3, 3, 1, 10), (11, 15)),  # the last two places stay empty
        ((3, 3, 64, 40), (127, 127)),  # the first 32
        ((2, 3, 3, 4, 5), (4 * 3 - 1, 5 * 10 - 1)),
        ((30, 20), (30, 20)),
        ((30, 4, 5), (30, 20)),
        ((12,), (1, 12)),
        ((784, 300), (196, 150)),
        ((257, 10), (129, 10)),
    ],
)
def test_shapes_of_pictures(shape, expected):
    picture = lay_out(np.ones(shape, np.uint8))
    assert picture.shape == expected
    assert set(np.unique(picture[~np.isnan(picture)])) == {1.0}


def test_a_large_matrix_shows_shares():
    mask = np.zeros((512, 2), np.uint8)
    mask[0], mask[1, 0] = 1, 1
    np.testing.assert_array_equal(lay_out(mask)[:2], [[1.0, 0.5], [0.0, 0.0]])


SHAPES = {'conv': (3, 3, 2, 4), 'dense': (6, 16), 'scale': (5,), 'bias': (5,)}
PARAMS = {
    name: jax.random.normal(key, SHAPES[name])
    for name, key in zip(SHAPES, jax.random.split(jax.random.key(0), 4), strict=True)
}


def make_masks(names='conv dense scale'):
    masks = {name: np.asarray(PARAMS[name] > 0, np.uint8) for name in names.split()}
    return {name: masks.get(name) for name in SHAPES}


def make_state(is_packed, wrap=lambda tx: tx):
    tx = wrap(
        jaxpruner.FixedMask(make_masks(), use_packed_masks=is_packed).wrap_optax(optax.sgd(1.0))
    )
    return tx.init(PARAMS)


def pictures(figure):
    """What is drawn, by the first line of its title."""
    return {
        axes.get_title().split('\n')[0]: np.asarray(axes.images[0].get_array().filled(np.nan))
        for axes in figure.axes
        if axes.images
    }


SOURCES = {
    'masks': lambda: plot_masks(make_masks()),
    'state': lambda: plot_masks(make_state(False)),
    'packed state': lambda: plot_masks(make_state(True), params=PARAMS),
    'state inside another': lambda: plot_masks(
        make_state(True, lambda tx: optax.MultiSteps(tx, 2)), params=jax.eval_shape(lambda: PARAMS)
    ),
    'packed masks': lambda: plot_masks(make_state(True).masks, params=PARAMS),
}


@pytest.mark.parametrize('draw', SOURCES.values(), ids=SOURCES)
def test_each_masked_leaf_is_drawn(draw):
    drawn = pictures(draw())
    expected = {name: lay_out(mask) for name, mask in make_masks().items() if mask is not None}
    assert drawn.keys() == expected.keys()
    for name, picture in expected.items():
        np.testing.assert_array_equal(drawn[name], picture)


def test_some_leaves_are_chosen():
    assert list(pictures(plot_masks(make_masks(), leaves=['d*', 'scale']))) == ['dense', 'scale']


@pytest.mark.parametrize('ending', ['.png', '.svg'])
def test_the_image_is_written_whole(tmp_path, ending):
    path = tmp_path / 'new' / f'masks{ending}'
    plot_masks(make_masks(), str(path))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size > 1000


def test_titles_and_the_share_of_all_masks():
    figure = plot_masks({'w': jnp.array([[1, 0], [0, 0]], jnp.uint8), 'v': jnp.ones(4, jnp.uint8)})
    assert figure.get_suptitle().startswith('37.5% pruned')
    assert [axes.get_title() for axes in figure.axes[:2]] == [
        'v\n4, 4 of 4 kept',
        'w\n2×2, 1 of 4 kept',
    ]


def test_empty_leaves_and_numbers_have_their_places():
    figure = plot_masks({'none': np.ones((0, 4), np.uint8), 'one': np.uint8(1)})
    assert list(pictures(figure)) == ['one']


class FarAway:
    """A mask of which this process holds a part."""

    is_fully_addressable = False
    shape, size, ndim, dtype = (4, 4), 16, 2, np.dtype('uint8')


REFUSED = {
    'nothing masked': (lambda: plot_masks(make_masks('')), ValueError, 'no leaf is masked'),
    'packed without parameters': (lambda: plot_masks(make_state(True)), ValueError, 'give params='),
    'a name of nothing': (
        lambda: plot_masks(make_masks(), leaves='dens'),
        ValueError,
        "leaves: 'dens' matches no.*'dense'",
    ),
    'a name that is none': (lambda: plot_masks(make_masks(), leaves=[3]), TypeError, 'got 3'),
    'another ending': (lambda: plot_masks(make_masks(), 'a.txt'), ValueError, r'a\.txt.*\.png'),
    'too many': (
        lambda: plot_masks({str(n): np.ones(2, np.uint8) for n in range(41)}),
        ValueError,
        "41 masks.*at most 40.*leaves='0'",
    ),
    'masks of other processes': (
        lambda: plot_masks({'w': FarAway()}),
        ValueError,
        'w: .*process_allgather',
    ),
    'empty ones alone': (
        lambda: plot_masks({'w': np.ones((0, 4), np.uint8)}),
        ValueError,
        'leaves without weights',
    ),
}


@pytest.mark.parametrize(('draw', 'error', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()


def test_panels_make_a_square_of_at_most_four_columns():
    columns = []
    for number in (1, 2, 4, 5, 17):
        figure = plot_masks({str(n): np.ones((2, 2), np.uint8) for n in range(number)})
        columns.append(figure.axes[0].get_gridspec().ncols)
    assert columns == [1, 2, 2, 3, mask_images._MOST_COLUMNS]
