"""The page of errors holds what the library raises, and where it comes from."""

import inspect
import re

import jax.numpy as jnp
import pytest

import jaxpruner
from docs.extensions import error_messages, made_blocks
from jaxpruner import sparsity_types

PAGE = error_messages.public_names.ROOT / 'docs' / 'reference' / 'errors.md'


CALLS = {
    'a setting': lambda: jaxpruner.MagnitudePruning(sparsity=1.5),
    'an argument': lambda: jaxpruner.MagnitudePruning(sparsity=0.5).wrap_optax(3),
    'an unknown name': lambda: jaxpruner.create_updater_from_config({'algorithm': 'rigle'}),
    'a pattern': lambda: sparsity_types.parse_sparsity_type('3:2'),
    'a structure': lambda: jaxpruner.apply_mask({'a': jnp.ones(2)}, {'b': jnp.ones(2)}),
    'nothing': lambda: jaxpruner.FixedMask(None),
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


def test_the_page_has_all_messages_and_leads_to_entries():
    page = made_blocks.replace_blocks(PAGE.read_text())
    assert len(error_messages.messages()) > 250
    assert '{py:obj}`algorithms.fixed_mask.FixedMask.__init__ <jaxpruner.FixedMask>`' in page
    assert inspect.getdoc(jaxpruner.base_updater).partition('\n\n')[0] in page
