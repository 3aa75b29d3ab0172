"""Why tyro refused the arguments of a command, in one line: tyro itself prints a box of many.

The arguments are sorted once more, by the fields of the command's dataclass, and the first mistake is explained: an
option that does not exist, then a wrong value, then one argument too many, then a missing one. Any other mistake is
left in tyro's words.
"""

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpruner.tree import nearest

_NUMBERS = {int: 'a whole number', float: 'a number'}
_ANY_NUMBER = -1
_NEEDS_INPUTS = 'apply_fn=…, batches=…'
_NEEDS_LOSS = 'loss_fn=…, batches=…'
# Algorithms whose scores no file can tell -> what they need of the model.
_SCORED_BY_A_MODEL = {
    'wanda': _NEEDS_INPUTS,
    'ria': _NEEDS_INPUTS,
    'sparsegpt': _NEEDS_INPUTS,
    'synflow': _NEEDS_INPUTS,
    'snip': _NEEDS_LOSS,
    'grasp': _NEEDS_LOSS,
}


class _Option(NamedTuple):
    flag: str  # such as --masks-out, or without a flag the word for it in the help
    value_type: Any  # a class, or a Literal
    is_positional: bool
    is_required: bool
    most_values: int


class _SortedArguments(NamedTuple):
    values: dict[str, list[str]]  # by flag
    unknown: list[str]  # flags
    positional: list[str]


def explain(command: str, options: type, arguments: Sequence[str], printed: str) -> str:
    """Says what is wrong and what to write instead.

    Args:
      command: its name.
      options: its dataclass.
      arguments: those that were refused.
      printed: what tyro said, for mistakes of other sorts.

    >>> from jaxpruner.cli.prune import Prune
    >>> explain('prune', Prune, ['in', 'out', '--sparsity', '0.5'], '')
    'prune takes one CHECKPOINT; write to --out out'
    """
    hints = typing.get_type_hints(options, include_extras=True)
    flags: dict[str, _Option] = {}
    positional = None
    for field in dataclasses.fields(options):
        option = _option(field, hints[field.name])
        if option.is_positional:
            positional = option
        else:
            flags[option.flag] = option
    sorted_arguments = _sort(arguments, flags)
    if sorted_arguments.unknown:
        return _explain_unknown(sorted_arguments.unknown[0], flags)
    for flag, values in sorted_arguments.values.items():
        mistake = _explain_values(flags[flag], values)
        if mistake:
            return mistake
    missing = [flag for flag in flags if flags[flag].is_required]
    missing = [flag for flag in missing if flag not in sorted_arguments.values]
    if positional is not None:
        positionals = sorted_arguments.positional
        if positional.most_values == 1 and len(positionals) > 1:
            remedy = (
                f'write to --out {positionals[1]}'
                if '--out' in missing
                else f'leave {positionals[1]} out'
            )
            return f'{command} takes one {positional.flag}; {remedy}'
        if positional.is_required and not positionals:
            missing.insert(0, positional.flag)
    if missing:
        return f'{command} needs {" and ".join(missing)}; `jaxpruner {command} --help` says what that is'
    return f'{_in_one_line(printed)}; `jaxpruner {command} --help` says more'


def _option(field: dataclasses.Field[Any], hint: Any) -> _Option:
    metadata: tuple[Any, ...] = getattr(hint, '__metadata__', ())
    value_type = typing.get_args(hint)[0] if metadata else hint
    is_positional = len(metadata) > 1  # Positional, and the word for it
    flag = f'--{field.name.replace("_", "-")}'
    if is_positional:
        flag = metadata[1].metavar
    most_values = 0 if value_type is bool else 1
    if typing.get_origin(value_type) is tuple:
        most_values = _ANY_NUMBER
    if typing.get_origin(value_type) is not typing.Literal:
        # Of `float | None` and of `tuple[float, ...]` it is the first.
        value_type = (typing.get_args(value_type) or (value_type,))[0]
    return _Option(
        flag=flag,
        value_type=value_type,
        is_positional=is_positional,
        is_required=field.default is dataclasses.MISSING,
        most_values=most_values,
    )


def _sort(arguments: Sequence[str], flags: Mapping[str, _Option]) -> _SortedArguments:
    """Gives each option its values."""
    values: dict[str, list[str]] = {}
    unknown: list[str] = []
    positional: list[str] = []
    current = positional
    room = _ANY_NUMBER
    for argument in arguments:
        if re.match('--?[a-z]', argument):
            name, equals, value = argument.partition('=')
            flag = name.replace('_', '-')
            if flag not in flags:
                flag = flag.replace('--no-', '--', 1)
            if flag not in flags:
                unknown.append(name)
                continue
            current = values.setdefault(flag, [])
            room = flags[flag].most_values
            if equals:
                current.append(value)
                room = 0
        elif room:
            current.append(argument)
            room -= 1
        else:
            positional.append(argument)
    return _SortedArguments(values, unknown, positional)


def _explain_unknown(name: str, flags: Iterable[str]) -> str:
    # The dashes would make all of them alike.
    names = [flag.lstrip('-') for flag in (*flags, '--help')]
    hint = re.sub("'([a-z])", r"'--\1", nearest(name.lstrip('-'), names))
    return f'there is no option {name!r}; {hint}'


def _explain_values(option: _Option, values: Sequence[str]) -> str | None:
    if option.most_values == 1 and not values:
        return f'{option.flag} needs a value'
    choices = list(map(str, typing.get_args(option.value_type)))
    for value in values:
        if option.flag == '--scores' and value in _SCORED_BY_A_MODEL:
            return (
                f'--scores: {value!r} needs the model, which a checkpoint does not hold; call '
                f'jaxpruner.prune(params, 0.5, {value!r}, {_SCORED_BY_A_MODEL[value]}) in Python'
            )
        if choices and value not in choices:
            return f'{option.flag}: there is no {value!r}; {nearest(value, choices)}'
        if option.value_type in _NUMBERS and not _is_number(option.value_type, value):
            return _explain_number(option, value)
    return None


def _is_number(number_type: type, text: str) -> bool:
    try:
        number_type(text)
    except ValueError:
        return text == 'None'
    return True


def _explain_number(option: _Option, value: str) -> str:
    is_share = option.flag.startswith('--sparsit')
    words = 'lie in [0, 1]' if is_share else f'be {_NUMBERS[option.value_type]}'
    percent = re.fullmatch(r'(\d+(?:\.\d+)?) ?%', value)
    hint = ''
    if percent is not None:
        hint = f'; {percent[1]} per cent is {float(percent[1]) / 100:g}'
    return f'{option.flag} must {words}, got {value!r}{hint}'


def _in_one_line(printed: str) -> str:
    without_box = re.sub('[\u2500-\u257f]|-{3,}', ' ', printed)
    message = without_box.partition('For full helptext')[0]
    return ' '.join(message.split()) or 'the arguments are not understood'
