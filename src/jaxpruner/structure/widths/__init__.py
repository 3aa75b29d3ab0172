"""Modules built from source with smaller widths: their arguments, and the numbers in which they differ."""
