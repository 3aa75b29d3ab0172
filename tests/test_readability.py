"""The script that measures how hard the source is to read counts what it says."""

from ci import readability

SOURCE = '''"""A docstring.

With an empty line."""

# A comment.
def squares(numbers):
    """Another."""
    return [_square(number) for number in numbers]


def _square(number):
    return _times(number, number) if number else _times(0, 0)


def _times(a, b):
    return a * b


text = """a string
of two lines"""
'''


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path):
    path = tmp_path / 'squares.py'
    path.write_text(SOURCE)
    assert readability.size_of(path) == readability.Size(files=1, lines_of_code=8, called_once=1)


def test_the_report_of_this_source():
    rows = readability.report(readability.ROOT / 'src')
    for name in ('core of all', 'all', 'one 90 % mask', 'one RigL step, traced'):
        assert ' files' in rows[name]
