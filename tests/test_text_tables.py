"""Plain text tables: what fits, what gives way, and that names stay apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner import text_tables
from jaxpruner.text_tables import Column

NAME = Column('leaf', overflow='fold')
COUNT = Column('kept', align='right')
REASON = Column('why', overflow='wrap')


def test_no_rows_and_letters_that_move_the_cursor():
    assert text_tables.to_text([NAME, COUNT], []) == 'leaf  kept\n----------'
    assert '\x1b' not in text_tables.to_text([NAME, COUNT], [['a\x1b[31m', '1']])


def test_names_break_behind_separators():
    names = ['encoder/layers/0/attention/kernel', 'model.layers.{0-23}.mlp.up_proj.weight']
    text = text_tables.to_text([NAME, COUNT], [[name, '1'] for name in names], width=24)
    body = [line.split('  ')[0] for line in text.split('\n')[2:]]
    assert body[:2] == ['encoder/layers/0/', 'attention/kernel']
    assert body[2:] == ['model.layers.', '{0-23}.mlp.', 'up_proj.weight']
    long = [['decoder/self_attention_norm', '1']]
    lines = text_tables.to_text([NAME, COUNT], long, width=16).split('\n')
    assert lines[2:] == ['decoder/       1', 'self_', 'attention_', 'norm']
    row = ['bias', 'see block/attention/kernel too']
    lines = text_tables.to_text([NAME, REASON], [row], width=24).split('\n')
    assert lines[2:] == ['bias  see block/', '      attention/kernel', '      too']


GROUPED = {
    'in the order of numbers': (
        [f'Dense_{i}' for i in (0, 1, 10, 11, 2, 3, 4)],
        'aaaaaaa',
        {'Dense_{0-4,10-11}': [0, 1, 4, 5, 6, 2, 3]},
    ),
    'by layer, then by leaf': (
        ['0/a', '0/b', '1/a', '1/b', '2/a', '2/b', 'head'],
        'ababab?',
        {'{0-2}/a': [0, 2, 4], '{0-2}/b': [1, 3, 5], 'head': [6]},
    ),
    'the first number that ends a part': (
        ['gpt2/h_0/w_1', 'gpt2/h_1/w_1', 'gpt2/h_2/w_1', 'gpt2/h_2/w_2', 'w0'],
        'aaaaa',
        {'gpt2/h_{0-2}/w_1': [0, 1, 2], 'gpt2/h_2/w_2': [3], 'w0': [4]},
    ),
}


@pytest.mark.parametrize('name', GROUPED)
def test_equal_layers_are_put_together(name):
    names, alike, expected = GROUPED[name]
    assert text_tables.group_layers(names, alike) == list(expected.items())


@given(
    st.lists(
        st.tuples(st.text('ab/', max_size=60), st.integers(0, 10**9), st.text('ab ', max_size=90)),
        max_size=6,
    ),
    st.integers(40, 100),
)
def test_every_line_fits(rows, width):
    texts = [[name, str(count), reason] for name, count, reason in rows]
    lines = text_tables.to_text([NAME, COUNT, REASON], texts, width=width).split('\n')
    assert max(map(len, lines)) <= width
    assert len(lines) >= 2 + len(rows)
