"""Feeds: batches that come from the host, one for each step, for data that do not fit on a device.

`FeedTraining` trains a task with a feed; each checkpoint holds the feed's position.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Values = Callable[[Any], np.ndarray]  # observations -> `Task.values` with the parameters of now


class Feed(Protocol):
    """Batches from the host, one for each step, in an order that can be taken up again."""

    def next(self, values: Values) -> Any:
        """The next batch: a pytree of NumPy arrays with the examples along the first axis.

        The arrays are not written to afterwards: the device may still read them. `values` is good
        until this returns; only players of games call it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes its position, and what else it keeps, into an empty folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Takes up the position of `save`, as a new feed of the same seed.

        Raises:
          ValueError: the folder holds something else.
        """
        ...

    def close(self) -> None:
        """Ends threads and processes and closes files; the feed is not used afterwards."""
        ...
