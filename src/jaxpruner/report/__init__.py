"""Results of runs as tables and plots."""
