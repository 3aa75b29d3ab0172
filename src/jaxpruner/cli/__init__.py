"""The command `jaxpruner`: a function for each of its commands, whose arguments tyro makes options of."""
