"""What the package promises around its code: dependencies, extras, types."""

import importlib.resources
import subprocess
import sys
import tomllib
from pathlib import Path

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
jaxpruner.prune  # loads the public names
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


ASSIGN_BEFORE_LOADING = """
import jaxpruner
jaxpruner.MagnitudePruning = 'mine'
jaxpruner.SET
print(jaxpruner.MagnitudePruning, hasattr(jaxpruner, 'a.b'), hasattr(jaxpruner, 'nothing'), jaxpruner.__version__)
"""


def test_what_is_assigned_stays_when_the_public_names_are_loaded():
    run = subprocess.run(
        [sys.executable, '-c', ASSIGN_BEFORE_LOADING], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ['mine', 'False', 'False', PROJECT['version']]


def test_every_lower_bound_is_the_version_tested_as_lowest():
    bounds = {}
    # Linters and the site are not part of what the lowest versions test, nor are games, which need a newer jax.
    for requirement in [
        *CORE,
        *(
            r
            for name, extra in EXTRAS.items()
            if name not in ('docs', 'games', 'lint')
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


def test_extra_all_takes_every_other_extra():
    (everything,) = EXTRAS['all']
    assert everything.name == PROJECT['name']
    assert everything.extras == EXTRAS.keys() - {'all'}


def test_package_is_marked_as_typed():
    assert importlib.resources.files('jaxpruner').joinpath('py.typed').is_file()
