"""Plain text tables: what fits, what gives way, and that names stay apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.core import text_tables
from jaxpruner.core.text_tables import Column

NAME = Column('leaf', overflow='middle')
COUNT = Column('kept', align='right')
REASON = Column('why', overflow='wrap')


def test_columns_are_as_wide_as_their_texts():
    text = text_tables.to_text(
        [NAME, COUNT], [['a/kernel', '1,024'], ['b', '3']], ['total', '1,027']
    )
    assert text.split('\n') == [
        'leaf       kept',
        '---------------',
        'a/kernel  1,024',
        'b             3',
        '---------------',
        'total     1,027',
    ]


def test_no_rows_and_no_total():
    assert text_tables.to_text([NAME, COUNT], []) == 'leaf  kept\n----------'


def test_names_that_look_alike_without_their_middles_stay_whole():
    names = [
        'encoder/layers/0/attention/kernel',
        'encoder/layers/1/attention/kernel',
        'head/norm/layers/weight/scale',
    ]
    lines = text_tables.to_text([NAME, COUNT], [[name, '1'] for name in names], width=24).split(
        '\n'
    )
    body = [line.split('  ')[0] for line in lines[2:]]
    assert ''.join(body[:2]) == names[0]
    assert ''.join(body[2:4]) == names[1]
    assert body[4] == 'head/norm…ht/scale'
    assert max(map(len, lines)) <= 24


def test_sentences_wrap():
    lines = text_tables.to_text(
        [NAME, REASON], [['bias', 'the filter leaves it out']], width=20
    ).split('\n')
    assert lines[2:] == ['bias  the filter', '      leaves it out']


def test_words_that_are_too_long_fold_behind_a_separator():
    row = ['bias', 'see block/attention/kernel too']
    lines = text_tables.to_text([NAME, REASON], [row], width=24).split('\n')
    folded = ['bias  see', '      block/attention/', '      kernel', '      too']
    assert lines[2:] == folded


@pytest.mark.parametrize(
    ('width', 'expected'), [(5, 'ab…ef'), (4, 'ab…f'), (6, 'abcdef'), (9, 'abcdef')]
)
def test_shorten(width, expected):
    assert text_tables.shorten('abcdef', width) == expected


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
