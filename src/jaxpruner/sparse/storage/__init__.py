"""A tree in its smallest formats: in memory (`packing`), as a file (`packed_files`), for JAX (`jax_sparse`)."""
