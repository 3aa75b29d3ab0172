"""The fields of a `ChannelGraph`, with `also` and `explain`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxpruner.structure.analysis.members import Group, PinnedAxis
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.graph import texts
from jaxpruner.structure.programs import ModelProgram
from jaxpruner.tree import Path, PyTree


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GraphRecord:
    """What the analysis found in a model; see `ChannelGraph`."""

    groups: Mapping[str, Group]
    pinned: tuple[PinnedAxis, ...]
    unused: tuple[Path, ...]
    trace: Trace
    model: Any = None
    others: tuple[Trace, ...] = ()

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of all programs."""
        return self.trace, *self.others

    def also(
        self,
        apply_fn: Callable[..., Any],
        *inputs: Any,
        state: PyTree | None = None,
    ) -> Self:
        """The graph of this model with one more program of the same parameters, such as evaluation or decoding.

        A channel can be removed if every program allows it. Its group is exact if it is exact in every program. Groups
        are named after the first program. Leaves of states with the same path are the same in all programs.

        Args:
          apply_fn: `(params, *inputs) -> results`, or `(params, state, *inputs) -> results` if there is a state.
          *inputs: as in `channel_groups`.
          state: as in `channel_groups`.

        Raises:
          ValueError: as in `channel_groups`; the graph has this function already; or a leaf of the state has a
            different number of axes in another program.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 1))}
        >>> def apply(p, x):
        ...     return jnp.tanh(x @ p['up']) @ p['down']
        >>> def features(p, x):
        ...     return jnp.tanh(x @ p['up'])
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> print(graph.also(features, jnp.ones((5, 2))).explain('up', 1))
        up[1], 4 channels, stays: axis 1 of result 0 of features
          tied to down[0]
        """
        model = self.model
        added = ModelProgram.of(apply_fn, state, inputs)
        for program in model.programs:
            if program.apply_fn == apply_fn:
                raise ValueError(f'the graph has the program {added.name} already')
        programs = [*model.programs, added]
        return model.analyse(model.params, programs)

    def explain(self, leaf: Path | str, axis: int) -> str:
        """Describes an axis of a leaf: its groups, or why it stays and which axes it is tied to.

        Args:
          leaf: its path, as a tuple or as text.
          axis: of the leaf; negative ones count from the end.

        Raises:
          KeyError: there is no such leaf.
          ValueError: it has no such axis.
        """
        return texts.explain(self, leaf, axis)

    def __repr__(self) -> str:
        exact_count = sum(group.exact for group in self.groups.values())
        groups = f'{len(self.groups)} groups, {exact_count} of them exact'
        others = f'{len(self.pinned)} pinned axes, {len(self.unused)} unused leaves'
        return f'ChannelGraph({groups}, {others})'

    def __str__(self) -> str:
        return texts.table(self)
