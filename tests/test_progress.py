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


def apply(params, x):
    return jnp.tanh(x @ params['a']) @ params['b']


PARAMS = {'a': jnp.eye(4), 'b': jnp.ones((4, 2))}
BATCHES = [jnp.ones((8, 4))] * 3


def half(params):
    return dict.fromkeys(params, 0.5)


def prune(**settings):
    wanted = settings.pop('progress', True)
    pruner = oneshot.Wanda(sparsity_distribution_fn=half, **settings)
    pruner.instant_sparsify(PARAMS, apply_fn=apply, batches=BATCHES, progress=wanted)


def test_batches_and_blocks_are_shown(monkeypatch):
    terminal = watched(monkeypatch)
    prune()
    assert 'calibrating' in terminal.getvalue()
    assert '2/3' in terminal.getvalue()
    terminal.truncate(0)
    prune(sequential=True)
    assert 'block 2 of 2' in terminal.getvalue()
    assert '6/6' in terminal.getvalue()


def test_nothing_is_shown_where_nobody_watches_or_wants_it(monkeypatch, capsys):
    terminal = watched(monkeypatch)
    prune(progress=False)
    oneshot.calibrate(apply, PARAMS, BATCHES, progress=False)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    prune()  # rich is not installed
    assert terminal.getvalue() == ''
    monkeypatch.undo()
    prune()
    assert capsys.readouterr().err == ''


def test_of_an_unknown_number(monkeypatch):
    terminal = watched(monkeypatch)
    with progress.progress_bar(None) as show:
        show('reading', 7, jnp.ones(3))
    assert '7/?' in terminal.getvalue()
