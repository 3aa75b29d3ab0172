"""The most memory that a process has had, of its own.

What `resource` says of a process is not less than what its parent had when it was started, and a process of tests has
had much.
"""

import subprocess
import sys
from pathlib import Path

import pytest

needs_status = pytest.mark.skipif(
    not Path('/proc/self/status').exists(), reason='memory is read from /proc, which Linux has'
)

_PRINT_PEAK = """
import sys
status = 0
{code}
for line in open('/proc/self/status'):
    if line.startswith('VmHWM'):
        print(int(line.split()[1]) / 1024)
sys.exit(status)
"""


def peak_mebibytes(code, *arguments):
    """Runs code in a process of its own, which may set `status`, and returns the most memory that it had."""
    command = [sys.executable, '-c', _PRINT_PEAK.format(code=code), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return float(run.stdout.split()[-1])
