"""What the library claims about speed and memory, measured: `python -m benchmarks --help` lists the subjects."""
