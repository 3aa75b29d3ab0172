"""The digits demo: its readers of MNIST, a short run, an interrupted one, and the accuracies that it promises."""

import gzip
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import digits
import digits_data
import digits_plots
import digits_report
import digits_training
from jaxpruner.baselines import data
from jaxpruner.baselines.convolutions import convolution_as_matmul

EXAMPLE = pathlib.Path(digits.__file__)
IMAGES, LABELS = 'train-images-idx3-ubyte', 'train-labels-idx1-ubyte'
SHORT = ['--steps', '4', '--seeds', '2', '--batch-size', '8', '--no-progress']


def mnist_arrays():
    random = np.random.default_rng(0)
    arrays = {}
    for part, number in (('train', 6), ('test', 3)):
        arrays[f'x_{part}'] = random.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        arrays[f'y_{part}'] = random.integers(0, 10, number, dtype=np.uint8)
    return arrays


def idx_bytes(array):
    header = [0x800 + array.ndim, *array.shape]
    return b''.join(number.to_bytes(4, 'big') for number in header) + array.tobytes()


def write_npz(folder, **changes):
    np.savez_compressed(folder / 'mnist.npz', **{**mnist_arrays(), **changes})


def write_idx(folder, suffix='', dot=False):
    for key, name in data.IDX_NAMES.items():
        content = idx_bytes(mnist_arrays()[key])
        path = folder / (name.replace('-idx', '.idx') + suffix if dot else name + suffix)
        path.write_bytes(gzip.compress(content) if suffix else content)


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


# The readers.


@pytest.mark.parametrize(
    'write',
    [
        write_npz,
        write_idx,
        lambda folder: write_idx(folder, '.gz'),
        lambda folder: write_idx(folder, dot=True),
    ],
    ids=['npz', 'idx', 'idx.gz', 'dotted idx'],
)
def test_mnist_is_read_from_each_format(tmp_path, write):
    write(tmp_path)
    dataset = digits_data.load_dataset(tmp_path)
    arrays = mnist_arrays()
    assert dataset.name == 'MNIST'
    for part in ('train', 'test'):
        images, labels = getattr(dataset, f'x_{part}'), getattr(dataset, f'y_{part}')
        assert images.dtype == np.float32
        np.testing.assert_allclose(images[..., 0], arrays[f'x_{part}'] / 255, rtol=1e-6)
        np.testing.assert_array_equal(labels, arrays[f'y_{part}'])


def test_scikit_learns_digits_need_no_file():
    dataset = digits_data.load_dataset(None)
    assert len(dataset.x_train) + len(dataset.x_test) == 1797
    assert dataset.x_train.shape[1:] == (8, 8, 1)
    assert (dataset.x_train.min(), dataset.x_train.max()) == (0, 1)
    counts = np.bincount(dataset.y_test, minlength=10)
    assert counts.min() >= counts.max() - 3  # split alike for every class


def spoil(kind, folder):
    """Writes a folder that must be refused."""
    if kind.startswith('npz'):
        write_npz(folder)
    else:
        write_idx(folder, '.gz' if 'gz' in kind else '')
    arrays, npz = mnist_arrays(), folder / 'mnist.npz'
    match kind:
        case 'no file':
            for path in folder.iterdir():
                path.unlink()
        case 'idx missing':
            (folder / LABELS).unlink()
        case 'idx cut short':
            cut(folder / IMAGES, 100)
        case 'idx empty':
            cut(folder / IMAGES, 0)
        case 'idx only header':
            cut(folder / IMAGES, 8)
        case 'idx too long':
            with (folder / IMAGES).open('ab') as file:
                file.write(b'more')
        case 'idx of labels':
            (folder / IMAGES).write_bytes((folder / LABELS).read_bytes())
        case 'idx gz cut short':
            cut(folder / f'{IMAGES}.gz', 100)
        case 'idx gz in name only':
            (folder / f'{IMAGES}.gz').write_bytes(idx_bytes(arrays['x_train']))
        case 'idx of another set':
            (folder / LABELS).write_bytes(idx_bytes(arrays['y_test']))
        case 'npz cut short':
            cut(npz, 1000)
        case 'npz empty':
            cut(npz, 0)
        case 'npz damaged':
            content = bytearray(npz.read_bytes())
            content[len(content) // 3 : len(content) // 3 + 200] = bytes(200)
            npz.write_bytes(content)
        case 'npz of text':
            npz.write_text('version https://git-lfs.github.com/spec/v1')
        case 'npz is npy':
            with npz.open('wb') as file:
                np.save(file, arrays['x_train'])
        case 'npz lacks an array':
            np.savez(npz, **{key: value for key, value in arrays.items() if key != 'y_test'})
        case 'npz of objects':
            write_npz(folder, x_train=np.array([None, 'image'], object))
        case 'npz of floats':
            write_npz(folder, x_train=arrays['x_train'] / 255)
        case 'npz of letters':
            write_npz(folder, y_train=arrays['y_train'] + 10)
        case 'npz of two sizes':
            write_npz(folder, x_test=arrays['x_test'][:, :8, :8])


@pytest.mark.parametrize(
    ('kind', 'words'),
    [
        ('no file', ['mnist.npz', IMAGES, 'put']),
        ('idx missing', [LABELS, 'put']),
        ('idx cut short', [IMAGES, 'again']),
        ('idx empty', [IMAGES, 'put the right file']),
        ('idx only header', [IMAGES, 'again']),
        ('idx too long', [IMAGES, 'promises', 'again']),
        ('idx of labels', [IMAGES, '2049', '2051', 'put the right file']),
        ('idx gz cut short', [f'{IMAGES}.gz', 'again']),
        ('idx gz in name only', [f'{IMAGES}.gz', 'again']),
        ('idx of another set', ['6 images', 'labels of shape [3]', 'belong together']),
        ('npz cut short', ['mnist.npz', 'again']),
        ('npz empty', ['mnist.npz', 'again']),
        ('npz damaged', ['mnist.npz', 'again']),
        ('npz of text', ['mnist.npz', 'again']),
        ('npz is npy', ['mnist.npz', 'again']),
        ('npz lacks an array', ['mnist.npz', 'lacks y_test']),
        ('npz of objects', ['mnist.npz', 'again']),
        ('npz of floats', ['x_train', 'float64', 'original files']),
        ('npz of letters', ['y_train', '0 to 9', 'original files']),
        ('npz of two sizes', ['x_test', 'size', 'belong together']),
    ],
)
def test_a_bad_file_is_refused_by_name_with_the_remedy(tmp_path, kind, words):
    spoil(kind, tmp_path)
    with pytest.raises(data.DataError) as caught:
        digits_data.load_dataset(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    for word in words:
        assert word in message


def test_a_missing_folder_is_refused_by_name(tmp_path, capsys):
    assert digits.main(['--data-dir', str(tmp_path / 'nowhere'), '--out', str(tmp_path / 'out')]) == digits.REFUSED
    assert f'{tmp_path / "nowhere"} is not a folder' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


# The training.


@pytest.mark.parametrize('size', [7, 8, 28])
@pytest.mark.parametrize('stride', [1, 2, 3])
@pytest.mark.parametrize('padding', ['SAME', 'VALID', ((1, 1), (0, 2))])
def test_the_convolution_is_xlas(size, stride, padding):
    images = jax.random.normal(jax.random.key(0), (2, size, size, 3))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 5))
    expected = jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    found = convolution_as_matmul(images, kernel, (stride, stride), padding)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize('steps', [1, 39, 40, 41, 1000])
def test_chunks_cover_each_step_once(steps):
    chunks = digits_training.Training(steps, seeds=1, batch_size=1, learning_rate=0.1).chunks()
    assert [step for first, stop in chunks for step in range(first, stop)] == list(range(steps))
    assert all(first < stop for first, stop in chunks)


# The run.


def test_a_short_run_leaves_table_results_and_plots(tmp_path, capsys):
    out = tmp_path / 'new' / 'out'
    names = ['magnitude', 'random', 'magnitude_2:4']
    assert digits.main([*SHORT, '--out', str(out), '--algorithms', *names]) == 0
    printed = capsys.readouterr()
    for name in ('dense', *names, 'accuracy %', 'reached', 'time/step'):
        assert name in printed.out
    assert printed.err == ''

    content = json.loads((out / 'results.json').read_text())
    assert content['finished']
    results = [digits_report.Result(**fields) for fields in content['results']]
    assert [result.name for result in results] == ['no_prune', *names]
    sparsities = {result.name: result.sparsities for result in results}
    np.testing.assert_allclose(sparsities['no_prune'], 0)
    np.testing.assert_allclose(sparsities['magnitude'], 0.9, atol=1e-3)
    kept_dense = 320 / (144 + 4608 + 4096 + 320)  # the head
    np.testing.assert_allclose(sparsities['magnitude_2:4'], 0.5 * (1 - kept_dense), atol=1e-3)
    for result in results:
        assert len(result.accuracies) == len(result.sparsities) == 2
        assert result.relative_time > 0
        assert np.shape(result.first_layer_mask) == (3, 3, 1, 16)
    assert sorted(path.name for path in out.iterdir()) == ['accuracy.png', 'first_layer_masks.png', 'results.json']
    for name in ('accuracy.png', 'first_layer_masks.png'):
        assert (out / name).read_bytes().startswith(b'\x89PNG')


def test_an_interrupted_run_keeps_what_is_done_and_goes_on(tmp_path, capsys, monkeypatch):
    arguments = [*SHORT, '--over-seeds', 'vmap', '--out', str(tmp_path), '--algorithms', 'magnitude_ste']
    trained, train = [], digits.train

    def stop_at_second(*args):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(args)
        return train(*args)

    with monkeypatch.context() as patch:
        patch.setattr(digits, 'train', stop_at_second)
        assert digits.main(arguments) == digits.INTERRUPTED
    printed = capsys.readouterr().out
    assert '1 of 2 algorithms' in printed
    assert 'dense' in printed
    left = json.loads((tmp_path / 'results.json').read_text())
    assert not left['finished']
    assert [fields['name'] for fields in left['results']] == ['no_prune']
    assert (tmp_path / 'accuracy.png').exists()

    assert digits.main(arguments) == 0
    assert '2 of 2 algorithms' in capsys.readouterr().out
    done = json.loads((tmp_path / 'results.json').read_text())
    assert done['finished']
    assert done['results'][0] == left['results'][0]
    assert [fields['name'] for fields in done['results']] == ['no_prune', 'magnitude_ste']


def a_result(name='magnitude', family='pruned while training', accuracy=0.9):
    return digits_report.Result(name, family, '90%', [accuracy, accuracy + 0.01], [0.9, 0.9], 1.1, [[[[0, 1, 1]]]], 2.0)


@pytest.mark.parametrize(
    ('finished', 'settings', 'fresh', 'continued'),
    [
        (False, {'steps': 4}, False, True),
        (False, {'steps': 4}, True, False),
        (False, {'steps': 5}, False, False),
        (True, {'steps': 4}, False, False),
    ],
    ids=['interrupted', 'fresh', 'other settings', 'finished'],
)
def test_earlier_results_are_continued_or_kept_beside(tmp_path, finished, settings, fresh, continued):
    first = digits_report.ResultsFile(tmp_path, {'steps': 4})
    first.add(a_result())
    first.write(finished)
    second = digits_report.ResultsFile(tmp_path, settings, fresh=fresh)
    assert second.results == ([a_result()] if continued else [])
    assert (tmp_path / 'results.earlier.json').exists() is not continued


@pytest.mark.parametrize(
    'content', ['{"finished": fal', '[]', '{"finished": false, "settings": {}, "results": [{}]}', '\0']
)
def test_a_damaged_results_file_is_set_aside(tmp_path, content):
    (tmp_path / 'results.json').write_text(content)
    assert digits_report.ResultsFile(tmp_path, {}).results == []
    assert (tmp_path / 'results.earlier.json').read_text() == content


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--algorithms', 'magnitud'], ["'magnitud'", 'magnitude']),
        (['--sparsity', '1.5'], ['1.5', '[0, 1]']),
        (['--steps', '0'], ['--steps', 'at least 1']),
        (['--drop-fraction', '2'], ['drop_fraction', '2']),
    ],
)
def test_bad_settings_are_refused_before_training(tmp_path, capsys, arguments, words):
    assert digits.main([*arguments, '--out', str(tmp_path / 'out')]) == digits.REFUSED
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert not (tmp_path / 'out').exists()


def test_the_plots_take_any_number_of_results(tmp_path):
    results = [a_result('no_prune', 'dense', 0.97), a_result('random_ste', 'straight-through', 0.1)]
    for some in (results[1:], results, results * 7):
        assert digits_plots.plot_accuracy(some, 'digits', tmp_path).exists()
        assert digits_plots.plot_first_layer_masks(some, tmp_path).exists()


def test_filters_are_tiled_with_gaps():
    mask = np.stack([np.zeros((2, 2, 1)), np.ones((2, 2, 1)), np.ones((2, 2, 1))], axis=-1)
    gap = np.nan
    expected = [[0, 0, gap, 1, 1], [0, 0, gap, 1, 1], [gap] * 5, [1, 1, gap, gap, gap], [1, 1, gap, gap, gap]]
    np.testing.assert_array_equal(digits_plots.tile_filters(mask), expected)


def test_the_script_runs_on_its_own():
    """From anywhere, without the tests' search path for modules."""
    done = subprocess.run([sys.executable, str(EXAMPLE), '--help'], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '--data-dir' in done.stdout


# What it promises.


@pytest.mark.slow
def test_accuracies_at_90_percent(tmp_path):
    names = ['magnitude', 'random', 'static_sparse', 'set', 'rigl']
    assert digits.main(['--no-progress', '--out', str(tmp_path), '--algorithms', *names]) == 0
    content = json.loads((tmp_path / 'results.json').read_text())
    results = {fields['name']: digits_report.Result(**fields) for fields in content['results']}
    assert results['no_prune'].mean > 0.96
    assert results['magnitude'].mean > results['no_prune'].mean - 0.015
    assert results['magnitude'].mean > results['random'].mean
    for name in ('set', 'rigl'):
        assert results[name].mean >= results['static_sparse'].mean - results[name].deviation
