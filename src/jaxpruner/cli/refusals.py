"""Why tyro refused the arguments of a command, in one line: tyro itself says it in a box."""

import dataclasses
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxpruner.core.nearest_names import nearest

_NUMBERS = {int: 'a whole number', float: 'a number'}


class _Option(NamedTuple):
    flag: str  # or, without one, the word for it in the help
    types: tuple[Any, ...]  # that a value may have
    is_positional: bool
    is_required: bool
    takes: int  # values; -1 for any number


class _Given(NamedTuple):
    values: dict[str, list[str]]  # by flag
    unknown: list[str]  # flags
    positional: list[str]


def explain(command: str, options: type, given: Sequence[str], printed: str) -> str:
    """Says what is wrong and what to write instead.

    Args:
      command: its name.
      options: its dataclass.
      given: the arguments that were refused.
      printed: what tyro said, for mistakes of other sorts.

    >>> from jaxpruner.cli.prune import Prune
    >>> explain('prune', Prune, ['in', 'out', '--sparsity', '0.5'], '')
    'prune takes one CHECKPOINT; write to --out out'
    """
    known = _options(options)
    flags = {option.flag: option for option in known if not option.is_positional}
    sorted_out = _sort_out(given, flags)
    if sorted_out.unknown:
        return _unknown(sorted_out.unknown[0], flags)
    for flag, values in sorted_out.values.items():
        wrong = _wrong_value(flags[flag], values)
        if wrong:
            return wrong
    lacking = [
        flag
        for flag, option in flags.items()
        if option.is_required and flag not in sorted_out.values
    ]
    positional = next((option for option in known if option.is_positional), None)
    wrong = _wrong_number(command, positional, sorted_out.positional, lacking)
    return wrong or f'{_in_one_line(printed)}; `jaxpruner {command} --help` says more'


def _options(options: type) -> list[_Option]:
    hints = typing.get_type_hints(options, include_extras=True)
    return [_option(field, hints[field.name]) for field in dataclasses.fields(options)]


def _option(field: dataclasses.Field[Any], hint: Any) -> _Option:
    marks: tuple[Any, ...] = getattr(hint, '__metadata__', ())
    metavar = next((mark.metavar for mark in marks if getattr(mark, 'metavar', None)), None)
    is_positional = len(marks) > 1  # Positional and the word for it
    inner = typing.get_args(hint)[0] if marks else hint
    is_tuple = typing.get_origin(inner) is tuple
    types = typing.get_args(inner) or (inner,)
    if typing.get_origin(inner) is typing.Literal:
        types = (inner,)
    takes = -1 if is_tuple else int(inner is not bool)
    flag = metavar if is_positional and metavar else f'--{field.name.replace("_", "-")}'
    return _Option(flag, types, is_positional, field.default is dataclasses.MISSING, takes)


def _sort_out(given: Sequence[str], flags: dict[str, _Option]) -> _Given:
    sorted_out = _Given({}, [], [])
    values, left = sorted_out.positional, -1
    for argument in given:
        if re.match('--?[a-z]', argument):
            name, equals, value = argument.partition('=')
            flag = name.replace('_', '-')
            if flag not in flags and flag.startswith('--no-'):
                flag = f'--{flag[5:]}'
            if flag not in flags:
                sorted_out.unknown.append(name)
                continue
            values = sorted_out.values.setdefault(flag, [])
            values += [value] * len(equals)
            left = 0 if equals else flags[flag].takes
        elif left:
            values.append(argument)
            left -= 1
        else:
            sorted_out.positional.append(argument)
    return sorted_out


def _unknown(name: str, flags: Iterable[str]) -> str:
    # The dashes would make all of them alike.
    hint = nearest(name.lstrip('-'), [flag.lstrip('-') for flag in (*flags, '--help')])
    return f'there is no option {name!r}; ' + re.sub("'([a-z])", r"'--\1", hint)


def _wrong_value(option: _Option, values: list[str]) -> str | None:
    if option.takes == 1 and not values:
        return f'{option.flag} needs a value'
    for kind in option.types:
        choices = [str(choice) for choice in typing.get_args(kind)]
        for value in values:
            if choices and value not in choices:
                return f'{option.flag}: there is no {value!r}; {nearest(value, choices)}'
            if kind in _NUMBERS and not _is_of(kind, value):
                return _no_number(option.flag, kind, value)
    return None


def _is_of(kind: Any, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return value == 'None'
    return True


def _no_number(flag: str, kind: Any, value: str) -> str:
    asked = 'lie in [0, 1]' if flag.startswith('--sparsit') else f'be {_NUMBERS[kind]}'
    share = re.fullmatch(r'(\d+(?:\.\d+)?) ?%', value)
    hint = f'; {share[1]} per cent is {float(share[1]) / 100:g}' if share else ''
    return f'{flag} must {asked}, got {value!r}{hint}'


def _wrong_number(
    command: str, positional: _Option | None, given: list[str], lacking: list[str]
) -> str | None:
    """What is wrong where arguments without a flag are too many, or required ones are missing."""
    if positional is not None and positional.takes == 1 and len(given) > 1:
        remedy = f'leave {given[1]} out'
        if '--out' in lacking:
            remedy = f'write to --out {given[1]}'
        return f'{command} takes one {positional.flag}; {remedy}'
    missing = (
        [positional.flag] if positional is not None and positional.is_required and not given else []
    )
    missing += lacking
    if not missing:
        return None
    return (
        f'{command} needs {" and ".join(missing)}; `jaxpruner {command} --help` says what that is'
    )


def _in_one_line(printed: str) -> str:
    text = re.sub('[\u2500-\u257f]|-{3,}', ' ', printed).partition('For full helptext')[0]
    return ' '.join(text.split()) or 'the arguments are not understood'
