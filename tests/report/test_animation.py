"""The animation of masks: pictures of kernels, the file, and files that hold no masks."""

import numpy as np
import PIL.Image
import pytest

from jaxpruner.report import animate_masks, animation
from jaxpruner.report.animation import read_masks

NAME = 'magnitude_0.8_0'


def write_masks(folder, **arrays):
    (folder / 'masks').mkdir()
    np.savez(folder / 'masks' / f'{NAME}.npz', **arrays)


def make_masks(number, *shape):
    random = np.random.default_rng(0).random((1, *shape))
    return (random > np.linspace(0, 0.8, number).reshape(-1, *[1] * len(shape))).astype(np.uint8)


@pytest.mark.parametrize(('steps', 'frames'), [(1, 1), (5, 5), (200, 6)])
def test_a_gif_with_a_picture_for_each_step(tmp_path, monkeypatch, steps, frames):
    monkeypatch.setattr(animation, '_MOST_FRAMES', 6)
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


STEPS = np.arange(2)
WRONG = {
    'no steps': ({'kernel': make_masks(2, 3, 4)}, "must hold 'steps'"),
    'no masks': ({'steps': STEPS}, "must hold 'steps'"),
    'no step': ({'steps': STEPS[:0], 'kernel': make_masks(1, 3, 4)[:0]}, 'at least one step'),
    'another number': (
        {'steps': STEPS, 'kernel': make_masks(3, 3, 4)},
        r'each of 2 steps, got uint8 of shape \(3, 3, 4\)',
    ),
    'other values': ({'steps': STEPS, 'kernel': 2 * make_masks(2, 3, 4)}, 'a mask of 0 and 1'),
    'no axes': ({'steps': STEPS, 'kernel': STEPS}, r'of shape \(2,\)'),
    'objects': ({'steps': STEPS, 'kernel': np.array([{}, {}])}, 'is no file of masks'),
}


@pytest.mark.parametrize(('arrays', 'message'), WRONG.values(), ids=WRONG)
def test_other_files_are_refused_by_name(tmp_path, arrays, message):
    write_masks(tmp_path, **arrays)
    with pytest.raises(ValueError, match=rf'{NAME}.npz.*{message}'):
        read_masks(tmp_path, NAME)


@pytest.mark.parametrize('content', [b'', b'no archive', b'PK\x03\x04cut'])
def test_broken_files_are_refused_by_name(tmp_path, content):
    write_masks(tmp_path, steps=STEPS)
    (tmp_path / 'masks' / f'{NAME}.npz').write_bytes(content)
    with pytest.raises(ValueError, match=rf'{NAME}.npz is no file of masks'):
        read_masks(tmp_path, NAME)


def test_missing_masks_are_named_with_those_that_are_there(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r'no masks of rigl_0.8_0: looked for .*rigl_0.8_0.npz; .* there: none',
    ):
        animate_masks(tmp_path, 'rigl_0.8_0', tmp_path / 'a.gif')
    write_masks(tmp_path, steps=STEPS, kernel=make_masks(2, 3, 4))
    with pytest.raises(FileNotFoundError, match=f'there: {NAME}'):
        animate_masks(tmp_path, 'rigl_0.8_0', tmp_path / 'a.gif')


def test_only_gifs_are_written(tmp_path):
    with pytest.raises(ValueError, match=r'its name must end in \.gif'):
        animate_masks(tmp_path, NAME, tmp_path / 'a.png')
