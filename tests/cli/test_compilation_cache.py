"""Compiled programs are kept in the user's cache folder, unless the user wants it otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import platformdirs
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import jaxpruner
from jaxpruner.cli import compilation_cache
from jaxpruner.cli.main import main

pytest.importorskip('filelock', reason='the extra `cli` installs it')

NAMES = (
    'jax_compilation_cache_dir',
    'jax_compilation_cache_max_size',
    'jax_enable_compilation_cache',
    'jax_persistent_cache_min_compile_time_secs',
)
HITS = '/jax/compilation_cache/cache_hits'
LENET = ['lenet', '--set', 'steps=4', 'eval_every=1.0', 'batch_size=8', 'model.hidden=[4]']


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The user's cache folder; JAX has been told of no folder, and afterwards is as it was."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    for name in NAMES:
        monkeypatch.delenv(name.upper(), raising=False)
    # What compiles in no time is kept, too.
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    monkeypatch.setattr(
        platformdirs, 'user_cache_path', lambda name, appauthor: tmp_path / 'caches' / name
    )
    jax.config.update('jax_compilation_cache_dir', None)
    jax_cache.reset_cache()
    yield tmp_path / 'caches' / 'jaxpruner' / 'compiled'
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def events():
    """The events that JAX records."""
    recorded = []

    def listen(event, **_):
        recorded.append(event)

    jax.monitoring.register_event_listener(listen)
    return recorded


def compile_once_more(number):
    """Compiles a program that is the same whenever the number is."""
    jax.clear_caches()
    return jax.jit(lambda x: jnp.sin(x) * number)(jnp.ones(3)).block_until_ready()


def programs(folder):
    return sorted(folder.glob('*-cache'))


def test_a_second_process_loads_what_the_first_compiled(place, events):
    compile_once_more(1)  # JAX then knows that there is no cache
    compilation_cache.keep_programs()
    compile_once_more(2)
    kept = programs(place)
    assert kept
    assert HITS not in events

    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.keep_programs()
    compile_once_more(2)
    assert HITS in events
    assert programs(place) == kept


@pytest.mark.skipif(os.name == 'nt', reason='permissions of Windows are no bits')
def test_nobody_else_may_write_where_code_is_loaded_from(place):
    compilation_cache.keep_programs()
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('jax_compilation_cache_dir', 'mine'),
        ('jax_compilation_cache_dir', ''),
        ('jax_enable_compilation_cache', False),
    ],
)
def test_what_the_user_told_jax_holds(place, name, value):
    jax.config.update(name, value)
    before = {name: getattr(jax.config, name) for name in NAMES}
    compilation_cache.keep_programs()
    assert {name: getattr(jax.config, name) for name in NAMES} == before
    assert not place.exists()


def test_a_bound_of_the_environment_holds(place, monkeypatch):
    monkeypatch.setenv('JAX_COMPILATION_CACHE_MAX_SIZE', '5000')
    jax.config.update('jax_compilation_cache_max_size', 5000)  # as JAX reads it at its start
    compilation_cache.keep_programs()
    for number in range(6):
        compile_once_more(number)
    assert programs(place)
    assert sum(program.stat().st_size for program in programs(place)) <= 5000


def test_without_a_bound_all_programs_stay(place, monkeypatch, events):
    monkeypatch.setenv('JAX_COMPILATION_CACHE_MAX_SIZE', '-1')
    jax.config.update('jax_compilation_cache_max_size', -1)
    compilation_cache.keep_programs()
    compile_once_more(4)
    kept = programs(place)
    assert kept

    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.keep_programs()
    assert programs(place) == kept
    compile_once_more(4)
    assert HITS in events


def test_the_folder_does_not_grow_without_bound(place):
    compilation_cache.keep_programs()
    assert jax.config.jax_compilation_cache_max_size == 2**30


def test_half_programs_are_removed_and_whole_ones_stay(place, events):
    compilation_cache.keep_programs()
    compile_once_more(3)
    whole = programs(place)
    half = place / 'jit_step-0123-cache'
    half.write_bytes(whole[0].read_bytes()[:50])  # the disk was full, or the process was killed

    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.keep_programs()
    assert programs(place) == whole
    compile_once_more(3)
    assert HITS in events


def test_another_process_at_work_is_not_disturbed(place):
    import filelock

    place.mkdir(parents=True)
    half = place / 'jit_step-0123-cache'
    half.write_bytes(b'being written')
    with filelock.FileLock(place / '.lockfile'):
        compilation_cache.keep_programs()
    assert half.exists()
    assert jax.config.jax_compilation_cache_dir == str(place)


def in_a_file(place, monkeypatch):
    place.parents[1].write_bytes(b'')


def without_home(place, monkeypatch):
    monkeypatch.setattr(
        platformdirs, 'user_cache_path', lambda name, appauthor: Path('~/.cache', name)
    )


def without_filelock(place, monkeypatch):
    monkeypatch.setitem(sys.modules, 'filelock', None)


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (in_a_file, 'Not a directory'),
        (without_home, 'there is no home folder, and ~/.cache/jaxpruner/compiled is no full path'),
        (without_filelock, 'filelock'),
    ],
)
def test_where_it_cannot_be_used_a_warning_names_the_remedy(
    place, monkeypatch, tmp_path, make, words
):
    monkeypatch.chdir(tmp_path)
    make(place, monkeypatch)
    with pytest.warns(UserWarning, match='compiled programs are not kept: ') as caught:
        compilation_cache.keep_programs()
    message = str(caught[0].message)
    assert words in message
    assert 'JAX_COMPILATION_CACHE_DIR' in message
    assert '--no-compilation-cache' in message
    assert jax.config.jax_compilation_cache_dir is None
    assert not Path('~').exists()


@pytest.mark.parametrize('flags', [[], ['--no-compilation-cache']])
def test_a_training_keeps_programs_unless_told_otherwise(place, tmp_path, flags, capsys):
    out = ['--out', str(tmp_path / 'out')]
    assert main(['run', *LENET, *out, '--algorithm', 'random', *flags]) == 0
    assert capsys.readouterr().err == ''
    assert bool(programs(place)) == (not flags)


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    """They share a folder, below the one that the environment names, and neither warns of what the other writes."""
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join([str(Path(jaxpruner.__file__).parents[1]), *sys.path]),
        'XDG_CACHE_HOME': str(tmp_path / 'caches'),
    }
    del environment['JAX_COMPILATION_CACHE_DIR']
    command = [sys.executable, '-m', 'jaxpruner.cli', 'run', *LENET, '--algorithm', 'random']
    running = [
        subprocess.Popen(
            [*command, '--out', str(tmp_path / str(number))],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding='utf-8',
        )
        for number in range(2)
    ]
    assert [(process.communicate()[1], process.returncode) for process in running] == [('', 0)] * 2
    if sys.platform == 'linux':
        assert programs(tmp_path / 'caches' / 'jaxpruner' / 'compiled')
