"""`core.packing`, where code that is written for the library finds it."""

from jaxpruner.core.packing import *  # noqa: F403
