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
    'with_remedy',
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
    assert len([words for _, words in found if words]) > 400
    missing = [
        (place, words) for place, words in found if not all(word in page() for word in words)
    ]
    assert missing == []


def test_every_raise_without_words_of_its_own_is_known():
    """Their words come from elsewhere: constants, helpers that are on the page, or another error."""
    expressions = set()
    for path in error_messages.SOURCE.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                has_words = any(list(literals(part)) for part in node.exc.args)
                name = ast.unparse(node.exc.func)
                if not has_words and name not in error_messages.INTERNAL:
                    expressions.add(re.sub(r'\s+', ' ', ast.unparse(node.exc))[:60])
    assert {expression.partition('(')[0] for expression in expressions} <= {
        'AttributeError',
        'KeyError',
        'NotImplementedError',
        'TypeError',
        'ValueError',
        *HELPERS,
    }


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


@pytest.mark.parametrize(
    ('code', 'text'),
    [
        ("raise ValueError(f'{name!r} is {value.shape}')", '{name} is {shape}'),
        ("raise ValueError(f'{type(x).__name__}: ' + _REMEDY)", '{type of x}: call init first'),
        ("reason = f'because of {x}'\n    raise ValueError(reason)", 'because of {x}'),
        ('raise ValueError(_words(x))', 'no {x}'),
        ('raise ValueError(f\'{"a" if x else "b"} {len(x) + len(y)}\')', '{a | b} {…}'),
        ("raise ValueError(f'at most {_MOST}')", 'at most 32'),
        ('raise x', None),
        ("raise AssertionError('a bug')", None),
        ("warnings.warn('careful', UserWarning('that'))", None),
    ],
)
def test_words_are_read(code, text, tmp_path, monkeypatch):
    source = tmp_path / 'jaxpruner'
    source.mkdir()
    helper = "_REMEDY = 'call init first'\n_MOST = 32\ndef _words(x):\n    return f'no {x}'\n"
    (source / 'room.py').write_text(f'{helper}def function(x, y):\n    {code}\n')
    monkeypatch.setattr(error_messages, 'SOURCE', source)
    caches = [value for value in vars(error_messages).values() if hasattr(value, 'cache_clear')]
    for cache in caches:
        cache.cache_clear()
    found = error_messages.messages()
    for cache in caches:
        cache.cache_clear()
    assert [message.text for message in found] == ([] if text is None else [text])
    assert {message.function for message in found} <= {'function'}
