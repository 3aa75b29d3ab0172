"""Doctests of what needs a library that may be missing are left out with it."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec('gymnax') is None:
    collect_ignore += ['src/jaxpruner/baselines/games.py', 'src/jaxpruner/baselines/minatar.py']
if importlib.util.find_spec('ale_py') is None:
    collect_ignore += ['src/jaxpruner/baselines/atari.py', 'src/jaxpruner/baselines/atari_feed.py']
