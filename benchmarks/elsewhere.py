"""Subjects in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping


def command_elsewhere(name: str, size: str, rounds: int, as_json: bool) -> list[str]:
    """The command that measures a subject in another process."""
    command = [sys.executable, '-m', 'benchmarks', name, '--size', size, '--rounds', str(rounds)]
    return [*command, '--json'] if as_json else command


def printed_elsewhere(
    name: str, size: str, rounds: int, as_json: bool, environment: Mapping[str, str]
) -> str:
    """What a subject prints in a process that has these variables besides those of this one."""
    command = command_elsewhere(name, size, rounds, as_json)
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout
