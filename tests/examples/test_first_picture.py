"""The picture that opens the README: its masks, the command that makes it, and what it refuses."""

import csv
import os
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

import first_picture as example

ROOT = pathlib.Path(example.__file__).parents[1]


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, example.__file__, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {'PYTHONPATH': os.pathsep.join(path for path in sys.path if path)},
    )


def groups_of(name, mask):
    """The weights that stay or go together, or of which a fixed number stays: a row each."""
    inputs, outputs = mask.shape
    return {
        'unstructured': mask.reshape(1, -1),
        'N:M (2 of 4)': mask.T.reshape(-1, 4),
        'blocks (4×4)': mask.reshape(inputs // 4, 4, outputs // 4, 4)
        .swapaxes(1, 2)
        .reshape(-1, 16),
        'channels': mask.T,
    }[name]


@pytest.mark.parametrize('name', example.TYPES)
def test_each_mask_is_of_its_type_and_prunes_half(name):
    mask = example.masks_of_types()[name]
    assert mask.shape == example.WEIGHTS
    assert mask.mean() == 0.5
    groups = groups_of(name, mask)
    shares = {'unstructured': {0.5}, 'N:M (2 of 4)': {0.5}}.get(name, {0.0, 1.0})
    assert set(groups.mean(1).tolist()) == shares


def test_the_image_shows_six_algorithms_and_the_dense_network():
    assert len(example.ALGORITHMS) == 7
    with (ROOT / 'docs' / 'images' / 'first_picture.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert {row['algorithm'] for row in rows} == set(example.ALGORITHMS)
    sparsities = {row['sparsity'] for row in rows if row['algorithm'] != 'no_prune'}
    assert sparsities == set(example.SPARSITIES)
    assert {row['n'] for row in rows} == {'3'}
    accuracies = np.array([float(row['mean']) for row in rows])
    assert ((accuracies > 0) & (accuracies < 1)).all()
    with PIL.Image.open(ROOT / 'docs' / 'images' / 'first_picture.png') as image:
        assert 1200 <= image.width <= 2000


def test_another_ending_is_refused_before_any_work(tmp_path):
    result = run(tmp_path, '--image', 'picture.jpeg')
    assert result.returncode != 0
    assert 'picture.jpeg' in result.stderr
    assert '.png' in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_makes_the_picture_and_goes_on_where_it_stopped(tmp_path):
    for _ in range(2):
        result = run(tmp_path, '--small', '--image', 'new/picture.png')
        assert result.returncode == 0, result.stderr
    assert '13 of 13 cells' in ' '.join((result.stdout + result.stderr).split())
    assert sorted(path.name for path in (tmp_path / 'new').iterdir()) == [
        'picture.csv',
        'picture.png',
    ]
    assert (tmp_path / 'new' / 'picture.png').stat().st_size > 10_000
    with (tmp_path / 'new' / 'picture.csv').open() as file:
        assert len(list(csv.DictReader(file))) == 1 + 2 * 6
