"""Doctests of what needs a library that may be missing are left out with it."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec('gymnax') is None:
    collect_ignore += ['src/jaxpruner/baselines/dqn.py', 'src/jaxpruner/baselines/games.py']
