"""The script that measures how hard the source is to read counts what it says."""

import pathlib

from ci import readability

SOURCE = '''"""A docstring.

With an empty line."""

# A comment.
def squares(numbers):
    """Another."""
    return [number**2 for number in numbers]  # 10 tokens


text = """a string
of two lines"""
'''


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path):
    path = tmp_path / 'squares.py'
    path.write_text(SOURCE)
    assert readability.size_of(path) == readability.Size(
        lines=12, lines_of_code=4, tokens=19, comprehensions=1
    )


def test_the_report_of_this_source(capsys):
    readability.main([])
    printed = capsys.readouterr().out
    for name in ('core/', 'all', 'one step', 'one mask', 'an algorithm'):
        assert f'\n  {name} ' in printed
    places = readability.places_of_an_algorithm(pathlib.Path(readability.ROOT))
    assert 'tests/contract/tables.py' in places
