"""The notebooks are notebooks. The build of the site runs them all, and one runs here on other data."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

import jupytext
import nbclient
import nbclient.exceptions
import packaging.requirements
import pytest

import jaxpruner
from docs.extensions import notebook_outputs

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'docs' / 'notebooks'
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob('*.py'))
SECONDS = 300  # for one cell, on a machine that does other things, too


def read(name):
    return jupytext.read(FOLDER / f'{name}.py')


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook in a kernel of this Python, without any user's settings, and returns what its cells gave out."""
    for name in ('IPYTHONDIR', 'JUPYTER_CONFIG_DIR', 'JUPYTER_DATA_DIR', 'JUPYTER_RUNTIME_DIR'):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ('MNIST', 'MPLBACKEND'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('PYTHONPATH', str(pathlib.Path(jaxpruner.__file__).parents[1]))

    def run(notebook):
        # Sockets in files, where tests that run at once cannot take one another's ports; their paths must be short.
        with tempfile.TemporaryDirectory() as folder:
            client = nbclient.NotebookClient(
                notebook, timeout=SECONDS, resources={'metadata': {'path': str(tmp_path)}}
            )
            manager = client.create_kernel_manager()
            manager.transport, manager.connection_file = 'ipc', f'{folder}/kernel.json'
            client.execute()
        return [
            output for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs
        ]

    return run


def printed(outputs, name='stdout'):
    return ''.join(
        output.text for output in outputs if output.output_type == 'stream' and output.name == name
    )


def plots(outputs):
    return [output for output in outputs if 'image/png' in output.get('data', {})]


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_is_a_percent_notebook_that_begins_with_a_title(name):
    notebook = read(name)
    assert notebook.metadata['jupytext']['text_representation']['format_name'] == 'percent'
    assert notebook.metadata['kernelspec']['name'] == 'python3'
    title, *rest = notebook.cells
    assert title.cell_type == 'markdown'
    assert re.match(r'# \w', title.source)
    assert {cell.cell_type for cell in rest} == {'code', 'markdown'}
    for cell in rest:
        assert cell.source.strip(), 'an empty cell'
    # Written anew by jupytext, it has the same cells.
    again = jupytext.reads(jupytext.writes(notebook, 'py:percent'), 'py:percent')
    assert [(cell.cell_type, cell.source) for cell in again.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_pictures_have_words_for_those_who_do_not_see_them(name):
    cells = [
        cell
        for cell in read(name).cells
        if re.search(r'^(plt\.show|show_\w+|.*report\.plot_\w+)\(', cell.source, re.MULTILINE)
    ]
    assert len(cells) >= 3
    for cell in cells:
        assert len(cell.metadata['mystnb']['image']['alt']) > 40, cell.source


def installed_by(source, monkeypatch, missing):
    """The requirements that a first cell gives to pip where one module is missing."""
    commands = []
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, 'find_spec', lambda name: name != missing)
        patch.setattr(subprocess, 'run', lambda command, check: commands.append(command))
        namespace = {}
        exec(source, namespace)
    if missing not in namespace['NEEDED']:
        assert not commands
        return []
    (command,) = commands
    assert command[:4] == [sys.executable, '-m', 'pip', 'install']
    folder = command.index('--find-links')
    return command[folder + 2 :]


def modules_of(requirement, extras):
    """The modules that a requirement brings, those of jaxpruner's extras included."""
    requirement = packaging.requirements.Requirement(requirement)
    name = requirement.name.replace('-', '_')
    modules = {{'scikit_learn': 'sklearn', 'orbax_checkpoint': 'orbax'}.get(name, name)}
    for extra in requirement.extras:
        for line in extras[extra]:
            modules |= modules_of(line, extras)
    return modules


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_the_first_cell_installs_what_the_others_import(name, monkeypatch):
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    first, *rest = (cell.source for cell in read(name).cells if cell.cell_type == 'code')
    imported = set(re.findall(r'^(?:import|from) (\w+)', '\n'.join(rest), re.MULTILINE))
    imported -= sys.stdlib_module_names
    come_with_it = {module for line in project['dependencies'] for module in modules_of(line, {})}
    for module in imported - come_with_it:
        requirements = installed_by(first, monkeypatch, missing=module)
        brought = [modules_of(line, project['optional-dependencies']) for line in requirements]
        assert module in set().union(*brought), module
    assert installed_by(first, monkeypatch, missing=None) == []


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_links_lead_somewhere(name):
    targets = re.findall(r'\]\(([^)#:]+)\)', (FOLDER / f'{name}.py').read_text())
    for target in targets:
        assert (FOLDER / target).exists(), target


def test_the_build_of_the_site_runs_them_all():
    """`bash run.sh docs`: what fails or warns in a cell, or shows too few pictures, fails the build."""
    settings = (ROOT / 'docs' / 'conf.py').read_text()
    for name, value in {
        'nb_execution_mode': "'force'",
        'nb_execution_raise_on_error': 'True',
        'nb_output_stderr': "'error'",
    }.items():
        assert f'\n{name} = {value}\n' in settings
    assert "'docs.extensions.notebook_outputs'," in settings
    assert notebook_outputs.FEWEST_PICTURES == 3
    assert '--fail-on-warning' in (ROOT / 'run.sh').read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    'JAXPRUNER_SHARED' not in os.environ,
    reason='JAXPRUNER_SHARED does not name a folder with MNIST',
)
def test_mnist_pruning_runs_on_mnist(execute, monkeypatch):
    folder = pathlib.Path(os.environ['JAXPRUNER_SHARED']) / 'data'
    if not (folder / 'mnist.npz').exists():
        pytest.skip(f'{folder / "mnist.npz"} does not exist')
    monkeypatch.setenv('MNIST', str(folder))
    outputs = execute(read('mnist_pruning'))
    assert printed(outputs, 'stderr') == ''
    assert printed(outputs).startswith('MNIST: 10,000 images of 28x28')
