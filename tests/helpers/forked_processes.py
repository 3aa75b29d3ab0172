"""Processes for tests that kill them: one server imports what they need, once, and forks them."""

import contextlib
import multiprocessing
import os
import sys

import pytest

_TWO_DEVICES = '--xla_force_host_platform_device_count=2'


@contextlib.contextmanager
def forking():
    """A context of `multiprocessing` whose processes have imported everything, and two devices.

    A test process has one server, whichever test starts it: so all tests have to want the same of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', ':'.join(path for path in sys.path if path))
        patch.setenv('XLA_FLAGS', f'{os.environ.get("XLA_FLAGS", "")} {_TWO_DEVICES}'.strip())
        patch.setenv('JAX_PLATFORMS', 'cpu')
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['helpers.killed_prunes'])
        yield context
