"""Builds the package into dist/ and tries the wheel as somebody would who has nothing else.

`python ci/try_package.py` needs build and twine; `bash run.sh package` installs them. The wheel is built from the
source distribution, so that this holds all that it must. It is installed in a fresh environment and used in an empty
folder.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a newcomer does first, with few steps.
DEMO = 'demo --set steps=20'


def main():
    """Builds, checks and tries; ends with the output of what failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dist', type=Path, default=ROOT / 'dist', help='the folder to build into')
    dist = parser.parse_args().dist
    start = time.monotonic()
    wheel = build(dist)
    with tempfile.TemporaryDirectory(prefix='jaxpruner_package_') as folder:
        try_wheel(wheel, Path(folder))
    print(f'{wheel.name}: built, checked and tried in {time.monotonic() - start:.0f} s')


def build(dist):
    """Builds the source distribution, and of it the wheel; returns the wheel."""
    shutil.rmtree(dist, ignore_errors=True)
    run('build', sys.executable, '-m', 'build', '--outdir', dist, ROOT)
    (wheel,) = dist.glob('*.whl')
    (source,) = dist.glob('*.tar.gz')
    run('twine check', sys.executable, '-m', 'twine', 'check', '--strict', wheel, source)
    return wheel


def try_wheel(wheel, folder):
    """Installs the wheel alone, runs the first page; installs what the demo needs, runs the demo."""
    place = folder / 'an empty folder'
    place.mkdir()
    environment = folder / 'environment'
    venv.create(environment, with_pip=True)
    scripts = environment / ('Scripts' if os.name == 'nt' else 'bin')
    python = scripts / 'python'

    install(python, wheel)
    version = wheel.name.split('-')[1]
    run(
        'import',
        python,
        '-c',
        f'import jaxpruner; assert jaxpruner.__version__ == {version!r}',
        cwd=place,
    )
    (place / 'first_page.py').write_text(first_page())
    run('the first page', python, '-W', 'error', 'first_page.py', cwd=place)

    install(python, f'{wheel}[baselines]')
    run('the demo', scripts / 'jaxpruner', *DEMO.split(), cwd=place)
    made = sorted(path.name for path in (place / 'out' / 'demo').iterdir())
    missing = {'cells', 'sparsity.png', 'layers.png'}.difference(made)
    if missing:
        sys.exit(f'the demo did not make {", ".join(sorted(missing))}, only {", ".join(made)}')


def first_page():
    """The Python of the README, in its order, as one program."""
    text = (ROOT / 'README.md').read_text()
    snippets = re.findall(r'^```python\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    if not snippets:
        sys.exit('README.md has no block of Python to run')
    return '\n'.join(snippets)


def install(python, requirement):
    """Installs a wheel, perhaps with extras, into an environment."""
    pip = ['-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    run(f'pip install {Path(requirement).name}', python, *pip, requirement)


def run(what, *command, cwd=None):
    """Runs a command where nothing of this folder is found; ends all with its output where it fails."""
    print(f'{what} ...', flush=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd or tempfile.gettempdir(),
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f'{result.stdout}\n{what} failed with {result.returncode}')


if __name__ == '__main__':
    main()
