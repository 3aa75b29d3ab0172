"""Tables of the keys of a configuration and of the algorithms, from the code and its docstrings."""

import dataclasses
import inspect
import re
from collections.abc import Sequence

from docs.extensions import coverage
from jaxpruner import api, checks, oneshot

# These sections describe keys, in Google's style.
_SECTION = re.compile(r'^(?:Attributes|Keys):\n((?:  .*\n|\n)*)', re.MULTILINE)
_ITEM = re.compile(r'^  ([\w, ]+): (.*(?:\n {4,}.*)*)', re.MULTILINE)


def described(value: object) -> dict[str, str]:
    """What a docstring says of each attribute or key."""
    words = {}
    for section in _SECTION.findall(inspect.getdoc(value) + '\n'):
        for names, text in _ITEM.findall(section):
            words |= dict.fromkeys(names.split(', '), ' '.join(text.split()))
    return words


def algorithms() -> dict[str, type]:
    """Every algorithm that a configuration can name."""
    assert oneshot.Wanda.__name__ in [cls.__name__ for cls in api.ONE_SHOT_REGISTRY.values()]
    return api.ALGORITHM_REGISTRY | api.ONE_SHOT_REGISTRY


def _fields(algorithm: type) -> list[str]:
    return [field.name for field in dataclasses.fields(algorithm) if field.init]


def meanings() -> dict[str, str]:
    """What each key means: in the words of `create_updater_from_config`, else of the first class that has it."""
    words = {}
    for algorithm in algorithms().values():
        for cls in algorithm.__mro__:
            if dataclasses.is_dataclass(cls):
                words = described(cls) | words
    return words | described(api.create_updater_from_config)


# Field -> keys of which a configuration makes it.
_MADE_OF = dict(checks.SAID_BY)
_MADE_OF['scheduler'] += ('power',)


def pruning() -> list[str]:
    """The names of the algorithms that prune; `no_prune` takes every key, and uses none."""
    return [name for name in algorithms() if name != 'no_prune']


def users(key: str) -> list[str]:
    """The names of the algorithms that have the key as a field, or a field that a configuration makes of it."""
    names = []
    for name in pruning():
        algorithm = algorithms()[name]
        fields = _fields(algorithm)
        made_of = [field for field in fields if key in _MADE_OF.get(field, ())]
        # It shares no budget among leaves.
        if getattr(algorithm, 'ranks_named_leaves_alone', False):
            made_of = [field for field in made_of if field != 'sparsity_distribution_fn']
        if key in fields or made_of:
            names.append(name)
    return names


def all_keys() -> list[str]:
    """Every key that a configuration may have, those of all algorithms first."""
    keys = [*described(api.create_updater_from_config), *checks.SETTINGS]
    for algorithm in algorithms().values():
        keys += _fields(algorithm)
    return list(dict.fromkeys(keys))


def _used_by(key: str) -> str:
    """A sentence on the algorithms that use the key, unless all do."""
    names = users(key)
    others = [name for name in pruning() if name not in names]
    if not names or not others:
        return ''
    verb, few = ('Used by', names) if len(names) <= len(others) else ('Not used by', others)
    return f' *{verb} ' + ', '.join(f'`{name}`' for name in few) + '.*'


def key_table(lines: Sequence[str] = ()) -> str:
    """Makes the table of keys; the lines of the block are not used."""
    del lines
    words = meanings()
    rows = ['| key | meaning |', '|---|---|']
    for key in all_keys():
        rows.append(f'| `{key}` | {_cell(words[key])}{_used_by(key)} |')
    return '\n'.join(rows)


def algorithm_table(lines: Sequence[str] = ()) -> str:
    """Makes the table of algorithms, with their classes; the lines of the block are not used."""
    del lines
    entries = {name.rpartition('.')[2]: name for name in coverage.documented_names()}
    rows = ['| name | class |', '|---|---|']
    for name, algorithm in algorithms().items():
        rows.append(f'| `{name}` | {{py:obj}}`~{entries[algorithm.__name__]}` |')
    return '\n'.join(rows)


def _cell(text: str) -> str:
    return text.replace('|', r'\|')
