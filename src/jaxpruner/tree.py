"""`core.tree`, where code that is written for the library finds it."""

from jaxpruner.core.tree import *  # noqa: F403
