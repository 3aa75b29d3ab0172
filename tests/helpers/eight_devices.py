"""Runs checks in a process with eight CPU devices: their number is settled when JAX starts.

A file that needs them names its functions `check_…`, which pytest leaves alone, and has a test that calls `run_checks`.
"""

import os
import subprocess
import sys

FLAG = '--xla_force_host_platform_device_count=8'


def run_checks(path, config, *arguments):
    """Collects the functions `check_…` of a file in another process and runs them with pytest.

    Args:
      path: the file.
      config: pytest's configuration here, whose warning filters hold there, too.
      *arguments: for pytest.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith('PYTEST_')
    }
    environment['XLA_FLAGS'] = f'{environment.get("XLA_FLAGS", "")} {FLAG}'.strip()
    environment['JAX_PLATFORMS'] = 'cpu'
    options = ['-q', '-p', 'no:cacheprovider', '-o', 'python_functions=check_', *arguments]
    options += [f'-W{text}' for text in config.getoption('pythonwarnings') or ()]
    run = subprocess.run(
        [sys.executable, '-m', 'pytest', str(path), *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, f'{run.stdout}\n{run.stderr}'
