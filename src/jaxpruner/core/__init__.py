"""A compiler trick or two of the selection."""
