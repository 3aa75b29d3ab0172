"""What the commands of the examples refuse before any work, and what Ctrl-C says."""

import pytest

import mnist_strategies
import oneshot_shakespeare
import shrink_cnn
import shrink_transformer
import train_block_sparse

REFUSED = [
    (shrink_cnn, '--seeds 1 1', '--seeds must be different'),
    (shrink_cnn, '--steps 120', '--steps must be a multiple of 50, got 120'),
    (shrink_cnn, '--data-dir nowhere', 'nowhere'),
    (shrink_transformer, '--seeds 1 1', '--seeds must be different'),
    (shrink_transformer, '--tune-steps -1', '--tune-steps must be at least 1, got -1'),
    (oneshot_shakespeare, '--seeds -1', '--seeds must be different whole numbers from 0 on'),
    (oneshot_shakespeare, '', 'needs --data-dir: a folder with tinyshakespeare.txt'),
    (
        oneshot_shakespeare,
        '--data-dir nowhere',
        "No such file or directory: 'nowhere/tinyshakespeare.txt'",
    ),
    (oneshot_shakespeare, '--table --out out', 'no results in out; without --table they are made'),
    (train_block_sparse, '--networks resnet', '--networks must be of lenet, wide, got resnet'),
    (train_block_sparse, '--seeds 1 1', '--seeds must be different'),
    (train_block_sparse, '--sparsities 1.0', '--sparsities must lie between 0 and 1'),
    (train_block_sparse, '--steps 1', '--steps must be at least 2, got 1'),
    (train_block_sparse, '--image curves.jpeg', 'curves.jpeg'),
    (mnist_strategies, '--strategy hlf', "'hlf' is no file and no name; choose from half"),
    (mnist_strategies, '--activation-density 0', 'got 0'),
    (mnist_strategies, '--data-dir nowhere', 'nowhere'),
]


@pytest.mark.parametrize(('example', 'arguments', 'message'), REFUSED)
def test_wrong_settings_are_refused_before_any_work(
    example, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv('JAXPRUNER_SHARED', raising=False)
    monkeypatch.chdir(tmp_path)
    assert example.main(arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('example', [shrink_cnn, shrink_transformer, oneshot_shakespeare])
def test_ctrl_c_says_how_to_go_on(example, capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(example, 'run', interrupted)
    assert example.main([]) == 130
    assert capsys.readouterr().out == 'Interrupted. The same command goes on.\n'
