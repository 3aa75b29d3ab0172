"""From what is kept to smaller arrays, a smaller program, and a file that says what was cut."""
