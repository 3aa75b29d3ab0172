"""The picture of channel groups: what it marks, and that it is written."""

import sys

import numpy as np
import PIL.Image
import pytest

import group_picture as example


def test_arrays_that_are_cut_are_what_no_group_removes():
    numbers, small = example.removed_by()
    for layer, leaves in numbers.items():
        for leaf, marks in leaves.items():
            stays = np.asarray(marks) == 0
            assert stays.sum() == small[layer][leaf].size, (layer, leaf)
    assert sorted(np.unique(numbers['second']['kernel'])) == [0, 1, 2, 3]


def test_the_picture_is_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'groups.png'
    monkeypatch.setattr(sys, 'argv', ['group_picture.py', '--image', str(path)])
    example.main()
    assert capsys.readouterr().out.strip() == str(path)
    with PIL.Image.open(path) as image:
        assert min(image.size) > 300


def test_an_image_of_no_known_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['group_picture.py', '--image', str(tmp_path / 'groups.txt')])
    with pytest.raises(ValueError, match=r'groups\.txt'):
        example.main()
