"""Reads compiled programs as XLA prints them."""

import math
import re
from typing import NamedTuple

_HEADER = re.compile(r'^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$')
# The type may be a tuple, with blanks in it; an opcode is the first word before a bracket.
_INSTRUCTION = re.compile(
    r'^\s+(?:ROOT )?%?[\w.\-]+ = (?P<type>.+?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$'
)
_ARRAY = re.compile(r'\b[a-z]+\d*\[([\d,]*)\]')
_CALLED = re.compile(
    r'\b(calls|to_apply|condition|body|true_computation|false_computation|branch_computations)'
    r'=(\{[^}]*\}|%?[\w.\-]+)'
)

ENTRY = 'ENTRY'


class Instruction(NamedTuple):
    """One line of a program."""

    opcode: str
    shapes: list[tuple[int, ...]]  # of the result; a tuple has several
    rest: str  # operands and attributes
    called: dict[str, list[str]]  # names of computations by attribute


def computations(text):
    """The instructions of each computation by its name; the program itself is `ENTRY`."""
    found, current = {}, []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found.setdefault(ENTRY if header['entry'] else header['name'], [])
        elif match := _INSTRUCTION.match(line):
            shapes = [
                tuple(int(n) for n in dims.split(',') if n)
                for dims in _ARRAY.findall(match['type'])
            ]
            called = {
                name: re.findall(r'[\w.\-]+', value)
                for name, value in _CALLED.findall(match['rest'])
            }
            current.append(Instruction(match['opcode'], shapes, match['rest'], called))
    return found


def reached(text, start=ENTRY):
    """The instructions of a computation and of all that it calls."""
    found = computations(text)
    pending, seen = [start], set()
    instructions = []
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        instructions += found[name]
        for instruction in found[name]:
            for names in instruction.called.values():
                pending += names
    return instructions


def largest_collective(text):
    """The number of elements of the largest array that devices send each other; 0 if they send none."""
    sizes = [
        math.prod(shape)
        for instruction in reached(text)
        if instruction.opcode.startswith(('all-', 'collective-', 'reduce-scatter'))
        for shape in instruction.shapes
    ]
    return max(sizes, default=0)
