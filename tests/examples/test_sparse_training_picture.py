"""The picture of training on blocks, from made-up measurements."""

import json
import re

import pytest

import sparse_training_picture as example

RATIO = {'median': 3.0, 'low': 2.5, 'high': 3.5}
ROWS = [
    {'name': 'MLP 3 x 1024', 'times as fast': RATIO},
    {'name': 'sparsity 0.5', 'times as fast': RATIO},
    {'name': 'sparsity 0.9', 'times as fast': RATIO},
    {'name': 'width 256', 'times as fast': RATIO},
    {'name': 'width 4096', 'times as fast': RATIO},
]


def test_the_values_that_are_shown_stand_beside_the_picture(tmp_path):
    measured = tmp_path / 'measured.json'
    measured.write_text(json.dumps({'rows': ROWS}))
    image = tmp_path / 'new' / 'picture.png'
    assert example.main([str(measured), '--image', str(image)]) == 0
    assert image.stat().st_size > 10_000
    lines = image.with_suffix('.csv').read_text().splitlines()
    assert lines[1] == 'sparsity,0.5,3.0,2.5,3.5'
    assert len(lines) == 5


@pytest.mark.parametrize(
    ('text', 'image', 'message'),
    [
        ('{}', 'a.png', "measured.json is no output of .*'rows'"),
        ('no JSON', 'a.png', 'measured.json is no output of'),
        ('{"rows": []}', 'a.png', 'measured.json has no rows'),
        ('{}', 'a.jpeg', 'a.jpeg'),
    ],
)
def test_other_files_are_refused(text, image, message, tmp_path, capsys):
    measured = tmp_path / 'measured.json'
    measured.write_text(text)
    assert example.main([str(measured), '--image', str(tmp_path / image)]) == example.REFUSED
    assert re.search(message, capsys.readouterr().err)
    assert sorted(tmp_path.iterdir()) == [measured]
