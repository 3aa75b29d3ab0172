"""`core.sparse_state`, where states that earlier versions pickled find their class."""

from jaxpruner.core.sparse_state import *  # noqa: F403
