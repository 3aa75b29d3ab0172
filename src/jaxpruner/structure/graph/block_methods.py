"""`blocks`, `without_blocks` and `drop_blocks`: residual blocks are removed as a whole."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Self

from jaxpruner.structure.cutting import shallow_model
from jaxpruner.structure.cutting.blocks import Block, find_blocks
from jaxpruner.structure.graph.record import GraphRecord
from jaxpruner.tree import PyTree


class BlockMethods(GraphRecord):
    """Finds residual blocks, and leaves them out."""

    @functools.cached_property
    def blocks(self) -> Mapping[str, Block]:
        """The residual blocks that can be left out, by name, in the order of the first program.

        A block computes something from a stream and adds it to the stream. Blocks inside loops, or inside functions
        with a `jit` of their own, are not found. Layers of a scan are a group instead, see `Group.is_depth`.
        """
        return find_blocks(self.traces)

    def without_blocks(self, names: Iterable[str], allow_inexact: bool = False) -> Self:
        """The graph of the model without some residual blocks: its programs do not compute them.

        Args:
          names: of blocks.
          allow_inexact: whether to leave out blocks for which this is not the same as zeroing them.

        Returns:
          A graph for parameters that `drop_blocks` returned; `small_apply({})` is the model's function.

        Raises:
          TypeError, KeyError, ValueError: as in `drop_blocks`.
        """
        chosen = shallow_model.chosen_blocks(self.blocks, names, allow_inexact)
        return shallow_model.without_blocks(self.model, chosen)

    def drop_blocks(
        self,
        tree: PyTree,
        names: Iterable[str],
        allow_inexact: bool = False,
        *,
        verify: bool = True,
    ) -> Any:
        """Replaces the leaves of some residual blocks by `None`, so that they take no memory and are not trained.

        Args:
          tree: the parameters, or a tree of their structure such as masks, averages or gradients; the state of the
            model; or a state of an optimizer.
          names: of blocks.
          allow_inexact: as in `without_blocks`.
          verify: compare the model without the blocks with the model in which they are zero, as `shrink` does.

        Raises:
          TypeError: `names` is a text.
          KeyError: there is no such block.
          ValueError: a block is not exact, or the model without them differs.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'block': {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 2))}, 'head': jnp.ones((2, 1))}
        >>> def apply(p, x):
        ...     return (x + jnp.tanh(x @ p['block']['up']) @ p['block']['down']) @ p['head']
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> small = graph.drop_blocks(params, ['block'])
        >>> small['block']
        {'down': None, 'up': None}
        >>> graph.without_blocks(['block']).small_apply({})(small, jnp.ones((1, 2)))
        Array([[2.]], dtype=float32)
        """
        chosen = shallow_model.chosen_blocks(self.blocks, names, allow_inexact)
        if verify and not allow_inexact and self.model.are_params(tree):
            for verification in shallow_model.verify_without_blocks(self.model, tree, chosen):
                if verification.verdict == 'different':
                    raise ValueError(
                        f'the model without {names} differs from the whole one with zeros ({verification}); '
                        'leave them in, or leave them out all the same with verify=False'
                    )
        return shallow_model.drop(tree, chosen)
