"""A progress bar is there for people alone."""

import importlib.util
import io
import sys

import jax.numpy as jnp

from jaxpruner import oneshot, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watched(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setattr(sys, 'stderr', Terminal())
    return sys.stderr


def calibrate(**settings):
    params = {'a': jnp.eye(4), 'b': jnp.ones((4, 2))}
    oneshot.calibrate(
        lambda params, x: jnp.tanh(x @ params['a']) @ params['b'],
        params,
        [jnp.ones((8, 4))] * 3,
        **settings,
    )


def test_batches_are_shown_and_numbers_that_are_not_known(monkeypatch):
    terminal = watched(monkeypatch)
    calibrate()
    assert 'calibrating' in terminal.getvalue()
    assert '2/3' in terminal.getvalue()
    with progress.progress_bar(None) as show:
        show('reading', 7, jnp.ones(3))
    assert '7/?' in terminal.getvalue()


def test_nothing_is_shown_where_nobody_watches_or_wants_it(monkeypatch, capsys):
    terminal = watched(monkeypatch)
    calibrate(progress=False)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    calibrate()  # rich is not installed
    assert terminal.getvalue() == ''
    monkeypatch.undo()
    calibrate()
    assert capsys.readouterr().err == ''
