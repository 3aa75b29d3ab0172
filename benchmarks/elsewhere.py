"""Subjects in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping


def printed_elsewhere(
    name: str, size: str, rounds: int, as_json: bool, environment: Mapping[str, str]
) -> str:
    """What a subject prints in a process that has these variables besides those of this one."""
    command = [sys.executable, '-m', 'benchmarks', name, '--size', size, '--rounds', str(rounds)]
    command += ['--json'] if as_json else []
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout
