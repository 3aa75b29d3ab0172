"""Messages of the library in the words of the command line: `--masks-out` where it speaks of `masks_out`."""

import re
from collections.abc import Collection

# Where a message speaks of an argument in the middle of a sentence.
_PHRASES = {
    'or overwrite it': 'or say --overwrite',
    'full name in only': 'full name in --only',
    'tensors out with skip': 'tensors out with --skip',
    'masks_out and out are': '--masks-out and --out are',
    ' (a ConfigDict sorts its keys: give pairs of name and value in a list instead)': '',
}
_SKIPPED = re.compile(r"skip=\[('[^\]]+)\]")


def in_options(message: str, options: Collection[str]) -> str:
    """Replaces the names of arguments with those of options; a command has none before it is known.

    >>> in_options('only: hed matches no parameter', ['only', 'seeds'])
    '--only: hed matches no parameter'
    >>> in_options('seed must not be negative', ['only', 'seeds'])
    '--seeds must not be negative'
    >>> in_options("leave them dense: skip=['a', 'b']", ['skip'])
    "leave them dense: --skip 'a' 'b'"
    """
    if not options:
        return message
    for phrase, words in _PHRASES.items():
        message = message.replace(phrase, words)
    message = _SKIPPED.sub(lambda match: f'--skip {match[1].replace(",", "")}', message)
    first_word = re.match(r'(?:an? )?([a-z_]+)', message)
    if first_word is None:
        return message
    word = first_word[1]
    plural = f'{word[:-1]}ies' if word.endswith('y') else f'{word}s'
    for option in (word, plural):
        if option in options:
            return f'--{option.replace("_", "-")}{message[first_word.end() :]}'
    return message
