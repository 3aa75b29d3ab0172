"""`zero_channels` and `nonzero_channels`: which channels are zero, after training for example."""

import numpy as np

from jaxpruner.structure import zero_channels
from jaxpruner.structure.graph.record import GraphRecord
from jaxpruner.tree import PyTree


class ZeroChannelMethods(GraphRecord):
    """Finds channels whose removal changes no result."""

    def zero_channels(self, tree: PyTree) -> dict[str, np.ndarray]:
        """Finds the channels that are zero already: removing them changes nothing.

        Not all members of a channel have to be zero. It is enough if the others then have no part in the results: a
        column of a kernel with its bias is enough, and so is the row of the next kernel. The program is searched for
        sets of members that are enough. Groups that are not exact are left out.

        Args:
          tree: parameters; masks, packed or not; or a state of a wrapped optimizer, which holds masks. It may be a
            subtree, such as `variables['params']`: leaves that are missing or `None` count as not zero.

        Returns:
          Name of a group -> indices, ascending, for groups with such channels. Where each layer, expert or head may
          keep channels of its own, the indices are those of channels that are zero in all of them.

        Raises:
          TypeError: values are traced.
          ValueError: a leaf has another shape than the model's, or no leaf is a parameter of the model.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1)).at[1:3].set(0)}
        >>> graph = channel_groups(lambda p, x: jnp.cos(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.zero_channels(params)
        {'up[1]': array([1, 2])}
        """
        channels = {}
        for name, is_zero in self._zero_flags(tree).items():
            lists = is_zero.reshape(-1, is_zero.shape[-1])
            is_zero_in_all = lists.all(axis=0)
            if is_zero_in_all.any():
                channels[name] = np.flatnonzero(is_zero_in_all)
        return channels

    def nonzero_channels(self, tree: PyTree) -> dict[str, np.ndarray]:
        """Finds the channels that `shrink` has to keep so that no result changes: those that are not zero already.

        Args:
          tree: as in `zero_channels`.

        Returns:
          Name of a group -> indices, ascending, for groups that have zero channels, too. A group whose channels are all
          zero keeps the first one. Where layers, experts or heads differ in their zero channels, each has a list of its
          own. All lists are as long as the longest.

        Raises:
          TypeError, ValueError: as in `zero_channels`.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1)).at[1:3].set(0)}
        >>> graph = channel_groups(lambda p, x: jnp.cos(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.nonzero_channels(params)
        {'up[1]': array([0, 3])}
        """
        keep = {}
        for name, is_zero in self._zero_flags(tree).items():
            left = zero_channels.left_over(is_zero)
            if left.shape[-1] < self.groups[name].size:
                keep[name] = left
        return keep

    def _zero_flags(self, tree: PyTree) -> dict[str, np.ndarray]:
        nonzero = zero_channels.nonzero_weights(self.trace, tree)
        return zero_channels.find(self.traces, self.groups.values(), nonzero)
