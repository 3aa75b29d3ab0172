"""`choose` and `cost`: which channels stay, and what the smaller model costs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxpruner.structure.choosing import choosing, costs
from jaxpruner.structure.choosing.choice_settings import Names, Settings
from jaxpruner.structure.choosing.choices import Choice
from jaxpruner.structure.cutting.keeping import KeepByGroup
from jaxpruner.structure.graph.record import GraphRecord
from jaxpruner.tree import PyTree


class ChoosingMethods(GraphRecord):
    """Chooses by scores and budgets."""

    def choose(
        self,
        params: PyTree,
        budget: str | None = None,
        *,
        counts: Mapping[str, int] | None = None,
        score: Any = 'magnitude',
        reduce: str = 'sum',
        normalise: str | Callable[[np.ndarray], np.ndarray] | None = 'mean',
        ranking: str = 'each',
        round_to: int | Mapping[str, int] = 1,
        least: float | Mapping[str, float] = 0.0,
        greatest: float | Mapping[str, float] = 1.0,
        leave: Names = (),
        equal: Names = (),
        depth: bool = False,
        gradients: PyTree | None = None,
        batches: Iterable[Any] | None = None,
        allow_inexact: bool = False,
        progress: bool = True,
    ) -> Choice:
        """Chooses which channels stay: those with the highest scores that fit into a budget.

        In each member, the scores of a channel's weights are summed and divided by the member's mean. The score of the
        channel is the sum over the members, or what `reduce` says. Where `Group.lists` has atoms, each of their indices
        (layer of a scan, expert, head) keeps channels of its own, and all keep the same number.

        The scores of the whole model decide how many channels stay. Each group is then ranked once more, without the
        weights that the other groups remove. So a head does not count for features that go, nor a feature for heads
        that go.

        Groups are given by names or globs. `*` and `?` are special in globs, brackets are not. If several globs of a
        mapping match a group, the first one counts.

        Args:
          params: arrays, on any devices. Sharded arrays are scored where they are.
          budget: `'parameters=0.5'`, `'flops=0.5'`, `'bytes=0.5'` or `'latency=0.5'`: the share of the whole model's
            that stays. For latency a handful of candidates are compiled and timed on the device at hand.
          counts: name or glob of groups -> how many channels stay, instead of a budget. Other groups stay whole.
          score: one of these. The name of an algorithm (`'magnitude'`, `'saliency'`, `'wanda'`, `'ria'`, `'random'`,
            ...). An algorithm, such as `RandomPruning(rng_seed=1)`. A tree like `params`, of arrays or `None`. A
            function of the matrix whose rows are a group's channels in one member, `(channels, weights of each)`. It
            returns numbers of shape `(channels,)` or `(channels, weights)`, which are summed, or `None` for no score.
            It also gets the arguments that it names: `gradients` (such a matrix), `member` and `group`.
          reduce: over a group's members, `'sum'`, `'mean'` or `'max'`.
          normalise: what each member's scores are divided by, `'mean'` or `'max'`. `'standard'` makes their mean 0 and
            their standard deviation 1, and `None` leaves them. Or a function of the array of a member's scores.
          ranking: which channels are ranked together: those of each group (`'each'`), of all groups (`'all'`), or of
            groups of like shape (`'alike'`). Each ranking loses the same share.
          round_to: the number of channels that stay is a multiple of this, or all of them. For all groups, or by glob.
          least: the least share of a group that stays, for all groups or by glob.
          greatest: the greatest share of a group that stays, likewise.
          leave: names or globs of groups that are left alone.
          equal: names or globs. Among the groups that one of them matches, those of like shape keep the same number.
          depth: whether layers of a scan may go, too (`Group.is_depth`). With `counts` it is enough to name them.
          gradients: a tree like `params`, for scores by gradients.
          batches: for calibrated scores, and the first one for latency. By default the inputs of the graph. A tuple
            holds the inputs, after the state if there is one; anything else is the only input.
          allow_inexact: whether to cut groups for which this is not the same as zeroing them.
          progress: show a bar while calibrating and timing, if stderr is a terminal and rich is installed.

        Returns:
          The channels that stay, in `Choice.keep`. It is printed as a table.

        Raises:
          TypeError: a setting has the wrong type, or parameters have no values.
          KeyError: a name or glob matches no group.
          ValueError: both or neither of budget and counts, a setting that is unknown or has no effect, a budget or
            limits that cannot be met, scores that are not finite, one array for two leaves, or counts that the number
            of devices does not divide.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> choice = graph.choose(params, 'flops=0.5')
        >>> print(choice)
        group  stay  of  score that stays
        ---------------------------------
        up[1]     2   4             0.571
        <BLANKLINE>
        the model   before  after  share
        --------------------------------
        parameters      12      6  0.500
        FLOPs          120     60  0.500
        bytes           48     24  0.500
        >>> graph.shrink(params, choice.keep)['up'].tolist()
        [[2.0, 3.0], [6.0, 7.0]]
        """
        settings = Settings(
            budget=budget,
            counts=counts,
            score=score,
            reduce=reduce,
            normalise=normalise,
            ranking=ranking,
            round_to=round_to,
            least=least,
            greatest=greatest,
            leave=leave,
            equal=equal,
            depth=depth,
            gradients=gradients,
            batches=batches,
            allow_inexact=allow_inexact,
            progress=progress,
        )
        return choosing.choose(self, params, settings)

    def cost(self, keep: KeepByGroup | None = None) -> costs.Cost:
        """Counts the parameters, bytes and floating point operations of the model, whole or after a cut.

        Nothing is traced or compiled. The numbers are read off the trace, for inputs of its shapes.

        Args:
          keep: as in `shrink`, also of inexact groups. Without it the whole model is counted.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.cost()
        Cost(parameters=12, flops=120, bytes=48)
        >>> graph.cost({'up[1]': [0, 3]}).flops
        60
        """
        return costs.cost_of_keep(self, keep or {})
