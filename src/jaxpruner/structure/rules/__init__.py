"""What primitives do with axes, with zeros, and with smaller operands; `primitives` has the table."""
