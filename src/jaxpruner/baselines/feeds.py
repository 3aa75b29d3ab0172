"""Feeds: batches that come from the host, one for each step, for data that do not fit on a device.

A task with a feed is trained by `fed.Fed`, which saves the feed's position with each checkpoint.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Values = Callable[
    [Any], np.ndarray
]  # observations -> what the forward pass of this moment says of them


class Feed(Protocol):
    """Batches from the host, one for each step, in an order that can be taken up again.

    >>> class Numbers:
    ...     position = 0
    ...     def next(self, values):
    ...         self.position += 1
    ...         return np.full((2, 1), self.position)
    ...     def save(self, folder):
    ...         (folder / 'position').write_text(str(self.position))
    ...     def restore(self, folder):
    ...         self.position = int((folder / 'position').read_text())
    ...     def close(self):
    ...         pass
    >>> feed: Feed = Numbers()
    >>> feed.next(None).tolist()
    [[1], [1]]
    """

    def next(self, values: Values) -> Any:
        """The next batch.

        Args:
          values: applies `Task.values` with the forward parameters of this moment to observations; good until this
            returns. Only players call it.

        Returns:
          A pytree of NumPy arrays with the examples along the first axis. They are not written to afterwards: the
          device may still read them.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes its position, and what else it keeps, so that a run resumes exactly.

        Args:
          folder: empty; a folder that was cut short is never restored from.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Takes up the position of `save`; the feed is new, made with the same seed.

        Args:
          folder: what `save` filled.

        Raises:
          ValueError: it holds something else.
        """
        ...

    def close(self) -> None:
        """Ends threads and processes and closes files; the feed is not used afterwards."""
        ...
