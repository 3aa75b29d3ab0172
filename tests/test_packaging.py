"""What the package promises around its code: dependencies, extras, types."""

import importlib.resources
import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_import_loads_only_core_dependencies():
    run = subprocess.run(
        [sys.executable, '-c', PRINT_WHAT_IS_LOADED], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_every_lower_bound_is_the_version_tested_as_lowest():
    lines = (ROOT / 'ci' / 'lowest.txt').read_text().splitlines()
    pins = dict(line.split('==') for line in lines if line and not line.startswith('#'))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    # Linters and the site are not part of what the lowest versions test, nor are games, which need a newer jax.
    tested = [extra for name, extra in EXTRAS.items() if name not in 'dev docs games lint'.split()]
    for requirement in itertools.chain(CORE, *tested):
        if requirement.name != PROJECT['name']:
            (bound,) = requirement.specifier
            assert bound.operator == '>=', requirement
            assert pins[canonicalize_name(requirement.name)] == bound.version, requirement


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


def test_classifiers_name_the_versions_of_python_that_are_tested():
    prefix = 'Programming Language :: Python :: 3.'
    claimed = [text for text in PROJECT['classifiers'] if text.startswith(prefix)]
    workflow = ROOT / '.github' / 'workflows' / 'tests.yml'
    jobs = yaml.safe_load(workflow.read_text())['jobs']
    tested = jobs['newest']['strategy']['matrix']['python-version']
    assert [text.removeprefix(prefix[:-2]) for text in claimed] == tested
    (oldest,) = [
        step['with']['python-version']
        for step in jobs['oldest']['steps']
        if 'setup-python' in step.get('uses', '')
    ]
    assert f'>={oldest}' == PROJECT['requires-python']
    assert oldest == tested[0]
