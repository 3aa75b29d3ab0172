"""What the library claims about speed and memory, measured: `python -m benchmarks` lists the subjects."""
