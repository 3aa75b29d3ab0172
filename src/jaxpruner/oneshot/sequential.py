"""Statistics block by block: those of a block are taken when the blocks before it have been pruned."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.explicit_meshes import on_explicit_mesh
from jaxpruner.oneshot.batches import as_batches, as_inputs, check_inputs, shapes_of
from jaxpruner.oneshot.blocks import Names, find_blocks, find_cuts
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.observed import Part, check_alike, find_observed, input_taps
from jaxpruner.uses import UseGraph, param_uses
from jaxpruner.uses.segments import Cut, Segments, State
from jaxpruner.uses.taps import Taps


class SequentialCalibration:
    """A model that is calibrated one block after another, with parameters that change in between.

    Of each batch some values are kept, those between two blocks: where a block begins with more than others, such as
    the second product of an MLP, it is run from where the block before it began. Each block is run two or three times:
    as it is, for its statistics, and once it is pruned.

    Attributes:
      blocks: in the order in which they have to be pruned.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: any pytree of arrays.
      batches: as in `calibrate`; all are held at once.
      kind: as in `calibrate`.
      only: names, globs or paths of leaves.
      names: which leaves make a block, as in `CalibratedPruning`.

    Raises:
      ValueError, UnsupportedPrimitive: as in `calibrate`.

    >>> import jax.numpy as jnp
    >>> params = {'a': jnp.eye(2), 'b': jnp.ones((2, 1))}
    >>> run = SequentialCalibration(lambda p, x: x @ p['a'] @ p['b'], params, [jnp.ones((1, 2))])
    >>> def squares(number):
    ...     ((_, statistics),) = run.take(number, params)
    ...     return statistics.second_moment.tolist()
    >>> squares(0)
    [1.0, 1.0]
    >>> params['a'] = 3 * params['a']  # it has been pruned
    >>> squares(1)
    [9.0, 9.0]
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: tree_lib.PyTree,
        batches: Iterable[Any],
        kind: str = 'second_moment',
        only: Sequence[str | tree_lib.Path] | str | None = None,
        names: Sequence[Names] | None = None,
    ):
        models: dict[Any, _Model] = {}
        self._batches: list[tuple[_Model, State]] = []
        for batch in as_batches(batches):
            inputs = as_inputs(batch)
            leaves, treedef = jax.tree.flatten(inputs)
            key = treedef, tuple(map(shapes_of, leaves))
            if key not in models:
                check_inputs(apply_fn, batch)
                models[key] = _Model(
                    param_uses(apply_fn, params, *inputs), kind == 'gram', only, names
                )
            self._batches.append((models[key], models[key].segments.begin(*inputs)))
        if not models:
            raise ValueError('batches are empty; calibration needs at least one')
        self._models = list(models.values())
        self._first, *others = self._models
        self.blocks = self._first.blocks
        for part in self.parts:
            if not part.matrices.of_all_trips:
                raise ValueError(
                    f'{tree_lib.path_string(part.path)}: a loop goes through this leaf and others, so that its trips '
                    'cannot be pruned one after another; leave sequential out'
                )
        for model in others:
            check_alike(self._first.observed, model.observed)
        if any(model.order() != self._first.order() for model in others):
            raise ValueError(
                'with batches of different shapes the model comes to its leaves in different orders, so that they '
                'cannot be pruned one after another; give batches of one shape'
            )

    @property
    def parts(self) -> list[Part]:
        """All weight matrices."""
        return self._first.observed.parts

    def take(
        self,
        number: int,
        params: tree_lib.PyTree,
        on_batch: Callable[[Any], None] = lambda found: None,
    ) -> list[tuple[Part, InputStatistics]]:
        """The statistics of a block; a layer's own where it is one.

        Args:
          number: of the block. No later one can have been asked for.
          params: the parameters, in which the blocks before it are pruned.
          on_batch: called with what has been found after each batch.

        Returns:
          The weight matrices of the block, and the statistics of their inputs.
        """
        values = sorted({self.parts[part].value for part in self.blocks[number].parts})
        totals: list[InputStatistics] | None = None
        reached = {model: model.reach(number) for model in self._models}
        for place, (model, state) in enumerate(self._batches):
            block, cut = model.blocks[number], model.cuts[number]
            state = model.segments.advance(params, state, reached[model], cut)
            self._batches[place] = (model, state)
            taps, observe = model.observer(
                tuple(values), cut.step, block.stop, block.layer is not None
            )
            if totals is None:
                within = (
                    None if block.layer is None else model.segments.program.steps[cut.step].path
                )
                totals = on_explicit_mesh(taps.zeros(within), (params, state))
            totals = observe(totals, params, state, cut.trips)
            on_batch(totals)
        of_value = dict(zip(values, totals or (), strict=True))
        return [
            (self.parts[part], of_value[self.parts[part].value])
            for part in self.blocks[number].parts
        ]


class _Model:
    """The program for batches of one shape."""

    def __init__(
        self,
        graph: UseGraph,
        with_gram: bool,
        only: Sequence[str | tree_lib.Path] | str | None,
        names: Sequence[Names] | None,
    ):
        self.observed = find_observed(graph, only)
        self.segments = Segments(graph, [use for uses in self.observed.values for use in uses])
        self.blocks = find_blocks(self.observed, self.segments.program, names)
        self.cuts = find_cuts(self.blocks, self.segments.program)
        self._with_gram = with_gram
        self._cut = Cut(0)
        # One compiled program for all trips of a scan.
        self.observer = functools.cache(self._observer)

    def order(self) -> list[Any]:
        """What is pruned when, to be compared."""
        return [
            ([self.observed.parts[part].path for part in block.parts], block.layer)
            for block in self.blocks
        ]

    def reach(self, number: int) -> Cut:
        """Goes to a block; returns where the batches are."""
        before, self._cut = self._cut, self.cuts[number]
        return before

    def _observer(
        self, values: tuple[int, ...], step: int, stop: int, in_trip: bool
    ) -> tuple[Taps, Any]:
        taps = input_taps([self.observed.values[value] for value in values], self._with_gram)
        return taps, self.segments.observe(taps, Cut(step, 0 if in_trip else None), stop)
