"""The pictures of the documents: what they show, how they are written, and what is refused."""

import json
import pathlib
import sys

import numpy as np
import PIL.Image
import pytest

import first_picture
import group_picture
import sparse_training_picture


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Calls an example in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(example, *arguments):
        monkeypatch.setattr(sys, 'argv', ['example', *arguments])
        example.main()

    return call


@pytest.mark.slow
def test_the_first_picture_is_made_and_goes_on_where_it_stopped(draw, capsys):
    for _ in range(2):
        draw(first_picture, '--small', '--image', 'new/picture.png')
        assert '5 of 5 cells' in ' '.join(capsys.readouterr().out.split())
    picture = pathlib.Path('new/picture.png')
    assert picture.stat().st_size > 10_000
    assert len(picture.with_suffix('.csv').read_text().splitlines()) == 2 + 2 * 2


def test_arrays_that_are_cut_are_what_no_group_removes():
    numbers, small = group_picture.removed_by()
    for layer, leaves in numbers.items():
        for leaf, marks in leaves.items():
            stays = np.asarray(marks) == 0
            assert stays.sum() == small[layer][leaf].size, (layer, leaf)
    assert sorted(np.unique(numbers['second']['kernel'])) == [0, 1, 2, 3]


def test_the_picture_of_groups_is_written(draw):
    draw(group_picture, '--image', 'groups.png')
    with PIL.Image.open('groups.png') as image:
        assert min(image.size) > 300


@pytest.mark.parametrize('example', [first_picture, group_picture])
def test_another_ending_is_refused_before_any_work(example, draw, tmp_path):
    with pytest.raises(ValueError, match=r'picture\.jpeg.*\.png'):
        draw(example, '--image', 'picture.jpeg')
    assert not list(tmp_path.iterdir())


def test_the_values_of_training_on_blocks_stand_beside_the_picture(tmp_path):
    ratio = {'median': 3.0, 'low': 2.5, 'high': 3.5}
    names = 'MLP 3 x 1024', 'sparsity 0.5', 'sparsity 0.9', 'width 256', 'width 4096'
    rows = [{'name': name, 'times as fast': ratio} for name in names]
    (tmp_path / 'measured.json').write_text(json.dumps({'rows': rows}))
    image = tmp_path / 'new' / 'picture.png'
    arguments = [str(tmp_path / 'measured.json'), '--image', str(image)]
    assert sparse_training_picture.main(arguments) == 0
    assert image.stat().st_size > 10_000
    lines = image.with_suffix('.csv').read_text().splitlines()
    assert (lines[1], len(lines)) == ('sparsity,0.5,3.0,2.5,3.5', 5)


def test_another_measurement_is_refused(tmp_path, capsys):
    measured = tmp_path / 'measured.json'
    measured.write_text('{"rows": []}')
    arguments = [str(measured), '--image', str(tmp_path / 'a.png')]
    assert sparse_training_picture.main(arguments) == sparse_training_picture.REFUSED
    assert 'measured.json has no rows' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [measured]
