"""The page of errors holds every message that the library raises: the words are read from the code in another way."""

import ast
import functools
import inspect
import re

import jax.numpy as jnp
import pytest

import jaxpruner
from docs.extensions import error_messages, made_blocks
from jaxpruner import sparsity_types

# Functions that make an error; words that they are given fill a placeholder of their message.
HELPERS = {
    'UnknownWeightsError',
    '_irreplaceable',
    '_is_writing',
    '_refusal',
    '_unreadable',
}
PAGE = error_messages.public_names.ROOT / 'docs' / 'reference' / 'errors.md'


@functools.cache
def page():
    return made_blocks.replace_blocks(PAGE.read_text())


def raised_words():
    """The literal words in each `raise` of the source, with where it stands; those of internal errors left out."""
    for path in sorted(error_messages.SOURCE.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            if ast.unparse(node.exc.func) in error_messages.INTERNAL | HELPERS:
                continue
            words = []
            for part in node.exc.args:
                words += [*literals(part)]
            yield f'{path.name}:{node.lineno}', words


def literals(node):
    """Words of strings, but not those inside the braces of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from literals(value)


def test_every_message_that_is_raised_is_on_the_page():
    found = list(raised_words())
    assert len([words for _, words in found if words]) > 250
    missing = [
        (place, words) for place, words in found if not all(word in page() for word in words)
    ]
    assert missing == []


CALLS = {
    'a setting': lambda: jaxpruner.MagnitudePruning(sparsity=1.5),
    'an argument': lambda: jaxpruner.MagnitudePruning(sparsity=0.5).wrap_optax(3),
    'a missing key': lambda: jaxpruner.create_updater_from_config({}),
    'an unknown name': lambda: jaxpruner.create_updater_from_config({'algorithm': 'rigle'}),
    'a pattern': lambda: sparsity_types.parse_sparsity_type('3:2'),
    'a type': lambda: sparsity_types.parse_sparsity_type('nothing'),
    'a structure': lambda: jaxpruner.apply_mask({'a': jnp.ones(2)}, {'b': jnp.ones(2)}),
    'a state': lambda: jaxpruner.sparsity_metrics({}),
    'nothing': lambda: jaxpruner.FixedMask(None),
    'a schedule': lambda: jaxpruner.PeriodicSchedule(5, 10, 3),
}


@pytest.mark.parametrize('call', CALLS.values(), ids=CALLS)
def test_what_is_raised_fits_a_message_on_the_page(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    fitting = [m for m in error_messages.messages() if pattern(m.text).fullmatch(str(caught.value))]
    assert fitting, caught.value
    assert {m.error for m in fitting} == {caught.type.__name__}


def pattern(text):
    """The regular expression of a message with placeholders."""
    literal = re.split(r'\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}', text)
    return re.compile('.*'.join(map(re.escape, literal)), re.DOTALL)


def test_messages_lead_to_functions_that_exist():
    for message in error_messages.messages():
        path = error_messages.SOURCE.parent / (message.module.replace('.', '/') + '.py')
        path = path if path.exists() else path.with_suffix('') / '__init__.py'
        last = message.function.rpartition('.')[2]
        assert not last or re.search(rf'(def|class) {last}\b', path.read_text()), message


def test_functions_with_an_entry_lead_to_it():
    assert '{py:obj}`algorithms.fixed_mask.FixedMask.__init__ <jaxpruner.FixedMask>`' in page()
    assert inspect.getdoc(jaxpruner.base_updater).partition('\n\n')[0] in page()
