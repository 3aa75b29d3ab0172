"""The workloads on which algorithms are compared: recipes, tasks, training, sweeps."""
