"""The methods of a `ChannelGraph` that find channels which are zero already."""

import numpy as np

from jaxpruner.core.tree import PyTree
from jaxpruner.structure import zero_channels
from jaxpruner.structure.graph.record import GraphRecord


class ZeroChannelMethods(GraphRecord):
    """Finds what can be removed without any change of the results."""

    def zero_channels(self, tree: PyTree) -> dict[str, np.ndarray]:
        """The channels that are zero already: removing them changes nothing.

        Some members of a channel are enough if the others then have no part in the results: a column of a kernel with
        its bias, or the row of the next kernel. The program says which; a channel that adds something all the same is
        not among them. Groups that are not exact are left out.

        Args:
          tree: parameters; or masks, packed or not; or a state of a wrapped optimizer, which holds masks. Leaves that
            it lacks, or for which it has `None`, count as not zero; so it may be a subtree, `variables['params']`.

        Returns:
          Name of a group -> indices, ascending, for groups that have some. Where each layer, expert or head may keep
          channels of its own, those that are zero in all. `nonzero_channels` has the rest.

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
        """What `shrink` has to keep so that nothing changes: all channels that are not zero already.

        Args:
          tree: as in `zero_channels`.

        Returns:
          Name of a group -> indices, ascending, for groups that have others, too. A group that is zero throughout keeps
          its first channel. Where layers, experts or heads differ in what is zero, each has a list of its own, all as
          long as the longest.

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
