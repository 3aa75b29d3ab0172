"""The reference data is what it was copied from, where that can be reached."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    'distributions.json',
    'interface.json',
    'masks.json',
    'masks.npz',
    'schedules.json',
    'trajectories.json',
    'trajectories.npz',
)


def test_every_data_file_is_named_here():
    assert sorted(path.name for path in HERE.iterdir() if path.suffix in ('.json', '.npz')) == list(
        FILES
    )


@pytest.mark.skipif(
    'JAXPRUNER_SHARED' not in os.environ, reason='JAXPRUNER_SHARED does not name the shared folder'
)
@pytest.mark.parametrize('name', FILES)
def test_copy_equals_its_source(name):
    source = Path(os.environ['JAXPRUNER_SHARED']) / 'golden' / name
    assert (HERE / name).read_bytes() == source.read_bytes()
