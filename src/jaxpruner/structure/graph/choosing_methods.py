"""The methods of a `ChannelGraph` that choose which channels stay, and count what that saves."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxpruner.core.tree import PyTree
from jaxpruner.structure.choosing import choosing, costs
from jaxpruner.structure.choosing.choice_settings import Names, Settings
from jaxpruner.structure.choosing.choices import Choice
from jaxpruner.structure.cutting.keeping import KeepByGroup
from jaxpruner.structure.graph.record import GraphRecord


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
        """Chooses which channels stay: those of the highest scores that a budget has room for.

        The score of a channel is the sum of the scores of its weights in each member, divided by the member's mean, and
        reduced over the members. Where `Group.lists` has atoms, channels are chosen for each of their indices (layers
        of a scan, experts, heads), the same number for each. How many stay is decided by the scores of the whole model.
        Which ones do is decided once more for each group by what the others leave, so that a head does not count for
        features that go, nor a feature for heads that go.

        Groups are named by their names or by globs; `*` and `?` are special in them, brackets are not. Where a mapping
        has globs, the first that matches a group counts.

        Args:
          params: arrays, on any devices; what is sharded is scored where it is.
          budget: `'parameters=0.5'`, `'flops=0.5'`, `'bytes=0.5'` or `'latency=0.5'`: the share that stays of the
            whole model's. For latency a handful of candidates are compiled and timed on the device at hand.
          counts: name or glob of groups -> how many channels stay, instead of a budget; other groups stay whole.
          score: the name of an algorithm (`'magnitude'`, `'saliency'`, `'wanda'`, `'ria'`, `'random'`, ...); or an
            algorithm, such as `RandomPruning(rng_seed=1)`; or a tree like `params`, of arrays or `None`; or a function
            of the matrix whose rows are a group's channels in one member, `(channels, weights of each)`. It returns
            numbers of shape `(channels,)`, or `(channels, weights)`, which are summed, or `None` where it has none. It
            also gets what it names of `gradients` (a matrix, too), `member` and `group`.
          reduce: over a group's members, `'sum'`, `'mean'` or `'max'`.
          normalise: what each member's scores are divided by, `'mean'` or `'max'`; `'standard'` makes their mean 0 and
            their standard deviation 1; `None` leaves them; or a function of the array of a member's scores.
          ranking: which channels are ranked together: of each group (`'each'`), of all groups (`'all'`), or of groups
            of like shape (`'alike'`). All that are ranked together lose the same share.
          round_to: multiples of which channels stay, or all of them; one for all groups, or by glob.
          least: the least share of a group that stays, one for all or by glob.
          greatest: the greatest share of a group that stays, likewise.
          leave: names or globs of groups that are left alone.
          equal: names or globs; of the groups that one of them means, those of like shape keep the same number.
          depth: whether layers of a scan may go, as well (`Group.is_depth`). With `counts` naming them will do.
          gradients: a tree like `params`, for scores by gradients.
          batches: for calibrated scores, and the first one for latency; by default what the graph was made with. A
            tuple holds the inputs, after the state if there is one; anything else is the only input.
          allow_inexact: whether groups may be cut although that is not the same as zeroing them.
          progress: show a bar while calibrating and timing, if stderr is a terminal and rich is installed.

        Returns:
          What stays, in `Choice.keep`; printed it is a table.

        Raises:
          TypeError: a setting has another type, or parameters have no values.
          KeyError: a name or glob means no group.
          ValueError: both or neither of budget and counts, a setting that is unknown or has no effect, a budget or
            limits that cannot be met, scores that are not finite, one array for two leaves, or counts that devices do
            not divide.

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
        """Counts the parameters, the bytes and the floating point operations of the model, whole or after a cut.

        Nothing is traced or compiled: the numbers are read off the trace, for inputs of its shapes.

        Args:
          keep: as in `shrink`; inexact groups, too. Without it the whole model is counted.

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
