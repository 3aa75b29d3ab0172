"""`jaxpruner order`: what it prints of made-up results, and its errors."""

import pytest

from helpers.made_up_cells import make_cells
from jaxpruner.cli import main as cli
from jaxpruner.report import write_cell

# In the original magnitude is better than set, and set than random.
VALUES = {
    ('magnitude', 0.8): [0.95, 0.96, 0.97],
    ('set', 0.8): [0.97, 0.98, 0.99],
    ('random', 0.8): [0.9, 0.99, 0.93],
}


@pytest.fixture
def folder(tmp_path):
    for cell in make_cells(VALUES):
        write_cell(tmp_path, cell)
    return str(tmp_path)


@pytest.mark.parametrize('every', [False, True])
def test_pairs_are_counted_and_contradictions_named(folder, capsys, every):
    assert cli.main(['order', folder, *(['--all'] if every else [])]) == 0
    first, *pairs = capsys.readouterr().out.splitlines()
    assert first == (
        'resnet (digits) against ResNet-50: of 3 pairs 2 agree, 0 differ by no more than chance, 1 contradict'
    )
    assert len(pairs) == (3 if every else 1)
    (contradiction,) = [pair for pair in pairs if pair.endswith('contradicts')]
    assert contradiction.startswith(
        '  resnet (digits): magnitude is better than set by -0.02 [-0.02, -0.02], 3 seeds'
    )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [([], 'name at least one folder'), (['--sparsity', '0.5'], 'share a seed at sparsity 0.5')],
)
def test_errors(folder, capsys, arguments, message):
    folders = [folder] if arguments else []
    assert cli.main(['order', *folders, *arguments]) == 2
    assert message in capsys.readouterr().err
