"""Rows of tests that cross several columns."""

import itertools

import pytest


def crossed(*columns):
    """Rows for `parametrize`: every combination, most of them slow.

    A fast run, and with it one with the oldest versions, meets each value in one row: what two values do together is
    up to this library, whichever version stands below it.
    """
    columns = [list(column) for column in columns]
    longest = max(map(len, columns))
    fast = {tuple(i % len(column) for column in columns) for i in range(longest)}
    rows = []
    for places in itertools.product(*(range(len(column)) for column in columns)):
        values = [column[i] for column, i in zip(columns, places, strict=True)]
        rows.append(pytest.param(*values, marks=() if places in fast else pytest.mark.slow))
    return rows
