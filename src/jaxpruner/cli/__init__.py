"""The command `jaxpruner`: one file for each of its commands, put together in `main`."""
