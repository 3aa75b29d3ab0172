"""What is known of a model's channels: `ChannelGraph` has the groups that can be removed, and says why others stay."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure import graph_texts, refitting, zero_channels
from jaxpruner.structure.analysis.members import Group, PinnedAxis
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.choosing import choosing, costs
from jaxpruner.structure.choosing.choice_settings import Names, Settings
from jaxpruner.structure.choosing.choices import Choice
from jaxpruner.structure.cutting import shallow_model, trees
from jaxpruner.structure.cutting.blocks import Block, find_blocks
from jaxpruner.structure.cutting.keeping import Keep, check_keep
from jaxpruner.structure.cutting.small_model import SmallApply
from jaxpruner.structure.cutting.verifying import Verification, verify
from jaxpruner.structure.programs import ModelProgram
from jaxpruner.structure.widths.folding import Folded, fold
from jaxpruner.structure.widths.old_numbers import OldNumbers
from jaxpruner.structure.widths.source_models import (
    SourceComparison,
    compare_with_source,
    find_old_numbers,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ChannelGraph:
    """The channels of a model: what can be removed together, and what cannot be removed. Made by `channel_groups`.

    Each leaf has a part in a group, is in `pinned`, or is in `unused`.

    Attributes:
      groups: name -> group, in the order in which the model uses their first leaves.
      pinned: the axes of leaves that stay as they are.
      unused: paths of leaves that have no part in the results.
      trace: the traced program and the axes of its values.
      model: the programs that were traced, and the shapes with which they were.
      others: traces of the programs that were added with `also`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> def apply(p, x):
    ...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
    >>> shapes = {'up': (3, 8), 'bias': (8,), 'down': (8, 2)}
    >>> graph = channel_groups(apply, {name: jnp.ones(shape) for name, shape in shapes.items()}, jnp.ones((5, 3)))
    >>> print(graph)
    group  channels  parameters  exact  members
    --------------------------------------------------
    up[1]         8          48  yes    bias, down, up
    2 axes stay as they are; graph.explain(leaf, axis) says why
    >>> print(graph.explain('down', 1))
    down[1], 2 channels, stays: axis 1 of result 0 of the model
    """

    groups: Mapping[str, Group]
    pinned: tuple[PinnedAxis, ...]
    unused: tuple[tree_lib.Path, ...]
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
        state: tree_lib.PyTree | None = None,
    ) -> 'ChannelGraph':
        """The graph of this model with one more program of the same parameters, such as evaluation or decoding.

        A channel can be removed if each program allows it, and its group is exact if it is so in each. Groups are named
        after the first program. Leaves of states with the same path are the same in all programs.

        Args:
          apply_fn: `(params, *inputs) -> results`, or `(params, state, *inputs) -> results` if there is a state.
          *inputs: as in `channel_groups`.
          state: as in `channel_groups`.

        Raises:
          ValueError: as in `channel_groups`; the graph has this function already; or a leaf of the state has another
            number of axes than in another program.

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
        program = ModelProgram.of(apply_fn, state, inputs)
        if any(each.apply_fn == apply_fn for each in self.model.programs):
            raise ValueError(f'the graph has the program {program.name} already')
        return self.model.analyse(self.model.params, [*self.model.programs, program])

    def choose(
        self,
        params: tree_lib.PyTree,
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
        gradients: tree_lib.PyTree | None = None,
        batches: Iterable[Any] | None = None,
        allow_inexact: bool = False,
        progress: bool = True,
    ) -> Choice:
        """Chooses which channels stay: those of the highest scores, so many that a budget is met.

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
          equal: names or globs; of the groups that one of them means, those of like shape keep as many channels.
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

    def shrink(
        self,
        tree: tree_lib.PyTree,
        keep: Keep,
        allow_inexact: bool = False,
        *,
        verify: bool = True,
    ) -> Any:
        """Cuts a tree along: what belongs to removed channels is left out.

        Args:
          tree: the parameters; the state of the model; masks, packed or not, averages, gradients of their structure; or
            a state of an optimizer, a wrapped one, too. Packed masks are packed anew. A cache may be of another batch.
          keep: name of a group -> the indices of its channels that stay, ascending; where `Group.lists` has atoms, also
            an array of such lists, all of one length, for each layer of a scan, expert or head. A group that is not
            named stays.
          allow_inexact: whether groups may be cut although that is not the same as zeroing them.
          verify: compare the smaller model with the zeroed one, as `verify` does, where the tree can be its parameters
            (arrays of their structure and dtypes) and the graph was made with arrays for inputs, which it holds. This
            compiles and runs three programs for each program of the model. Without inputs, and where inexact groups are
            allowed, nothing is compared.

        Returns:
          The tree with smaller arrays, on the devices where they are.

        Raises:
          TypeError: `keep` is no mapping, or indices are no whole numbers.
          KeyError: there is no such group.
          IndexError: a group has no such index.
          ValueError: no index, repeated ones, or ones that are not in order; a group that is not exact; an array that
            is none of those above, such as factored moments; or a smaller model that differs from the zeroed one.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> graph.shrink(params, {'up[1]': [0, 3]})['up'].tolist()
        [[0.0, 3.0], [4.0, 7.0]]
        """
        cut = check_keep(self.groups, keep, allow_inexact)
        if verify and not allow_inexact and cut.lists and self.model.are_params(tree):
            self._check_examples(tree, keep)
        return trees.shrink(tree, self.traces, cut)

    def zeroed(self, tree: tree_lib.PyTree, keep: Keep, allow_inexact: bool = False) -> Any:
        """As `shrink`, but what belongs to removed channels is set to zero, and all shapes stay."""
        cut = check_keep(self.groups, keep, allow_inexact)
        return trees.zeroed(tree, self.traces, cut)

    def expand(self, tree: tree_lib.PyTree, keep: Keep, allow_inexact: bool = False) -> Any:
        """The inverse of `shrink`: what stayed gets back to its place, with zeros for what was removed."""
        cut = check_keep(self.groups, keep, allow_inexact)
        return trees.expand(tree, self.traces, cut)

    def small_apply(
        self,
        keep: Keep,
        allow_inexact: bool = False,
        *,
        of: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """The apply function of the smaller model: the same program with smaller shapes.

        It can be compiled, differentiated, mapped over and trained as the model can. Rules of `jax.custom_jvp` and
        `jax.custom_vjp` stay; one that cannot be followed is an error when a derivative is taken. Numbers that were
        computed from an old width, such as `1 / width`, stay as they were; `old_numbers` lists them. For inputs of
        other shapes the model is traced anew. Callbacks that only show something are left out.

        Args:
          keep: as in `shrink`.
          allow_inexact: as in `shrink`.
          of: the function of the program, if it is not the first one.

        Returns:
          `(params, *inputs) -> results`, or `(params, state, *inputs) -> results`, of parameters and a state that
          `shrink` returned. A state that comes back is a small one, too.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; ValueError if there is no such program, and
            when it is called, for parameters or a state of other shapes.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> keep = {'up[1]': [0, 3]}
        >>> graph.small_apply(keep)(graph.shrink(params, keep), jnp.ones((1, 2)))
        Array([[14.]], dtype=float32)
        """
        return SmallApply(self, self.model.number_of(of), keep, allow_inexact)

    def verify(
        self,
        params: tree_lib.PyTree,
        keep: Keep,
        *inputs: Any,
        state: tree_lib.PyTree | None = None,
        allow_inexact: bool = False,
        of: Callable[..., Any] | None = None,
    ) -> Verification:
        """Compares the smaller model with the whole one of which the removed channels are zero.

        The error counts beside the change that the removal makes: where that is nothing, nothing is proven. Both models
        run with matrix products at full precision, for which the model is traced anew.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          *inputs: arrays.
          state: of the whole model, arrays. The results' state is compared, too, but for removed channels.
          allow_inexact: as in `shrink`.
          of: as in `small_apply`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; TypeError also if the state is missing.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 2)))
        >>> print(graph.verify(params, {'up[1]': [0, 3]}, jnp.ones((5, 2))))
        equal: the error is 0 of the change of 14 that the removal makes
        """
        number = self.model.number_of(of)
        own: ModelProgram = self.model.programs[number]
        if own.has_state != (state is not None):
            wants = 'a state: give state=' if own.has_state else 'no state'
            raise TypeError(f'{own.name} takes {wants}')
        whole = [params] if state is None else [params, state]
        zeroed = [self.zeroed(tree, keep, allow_inexact) for tree in whole]
        small = [self.shrink(tree, keep, allow_inexact, verify=False) for tree in whole]
        versions = [(*trees, *inputs) for trees in (whole, zeroed, small)]
        with jax.default_matmul_precision('highest'):
            program = ModelProgram.of(own.apply_fn, state, inputs)
            graph = self.model.with_program(number, params, program)
            small_apply = SmallApply(graph, number, keep, allow_inexact)
            return verify(own.apply_fn, small_apply, versions)

    def _check_examples(self, params: tree_lib.PyTree, keep: Keep) -> None:
        """Compares the smaller model with the zeroed one, in each program with arrays for arguments."""
        for program in self.model.programs:
            if program.examples is None:
                continue
            state = program.examples[0] if program.has_state else None
            inputs = program.examples[program.has_state :]
            verification = self.verify(params, keep, *inputs, state=state, of=program.apply_fn)
            if verification.verdict == 'different':
                where = f' in {program.name}' if self.others else ''
                raise ValueError(
                    f'the smaller model differs from the whole one with zeros{where} ({verification}); groups whose '
                    'removal differs are found one by one with graph.verify, and verify=False cuts all the same'
                )

    @functools.cached_property
    def blocks(self) -> Mapping[str, Block]:
        """The residual blocks that can be left out as a whole, by name, in the order of the first program.

        A block adds to a stream what it computes from it. Blocks of a program in loops, or in functions compiled apart,
        are not among them; layers of a scan are a group, see `Group.is_depth`.
        """
        return find_blocks(self.traces)

    def without_blocks(self, names: Iterable[str], allow_inexact: bool = False) -> 'ChannelGraph':
        """The graph of the model without some of its residual blocks: its programs do not compute them.

        Args:
          names: of blocks.
          allow_inexact: whether blocks may be left out although that is not the same as zeroing them.

        Returns:
          A graph for parameters that `drop_blocks` returned; `small_apply({})` is the model's function.

        Raises:
          TypeError, KeyError, ValueError: as in `drop_blocks`.
        """
        chosen = shallow_model.chosen_blocks(self.blocks, names, allow_inexact)
        return shallow_model.without_blocks(self.model, chosen)

    def drop_blocks(
        self,
        tree: tree_lib.PyTree,
        names: Iterable[str],
        allow_inexact: bool = False,
        *,
        verify: bool = True,
    ) -> Any:
        """Puts `None` for the leaves of some residual blocks, so that they take no memory and are not trained.

        Args:
          tree: the parameters; the state of the model; masks, averages, gradients of their structure; or a state of an
            optimizer.
          names: of blocks.
          allow_inexact: as in `without_blocks`.
          verify: compare the model without the blocks with the one in which they are zero, as `shrink` does.

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
                        'verify=False leaves them out all the same'
                    )
        return shallow_model.drop(tree, chosen)

    def cost(self, keep: Keep | None = None) -> costs.Cost:
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

    def refit(
        self,
        params: tree_lib.PyTree,
        keep: Keep,
        batches: Iterable[Any],
        *,
        damping: float = refitting.DAMPING,
        sequential: bool = False,
        allow_inexact: bool = False,
        progress: bool = True,
    ) -> tree_lib.PyTree:
        r"""Shrinks parameters after it has fitted them to calibration inputs by least squares.

        Each kernel $W$ that sums over removed channels gets new rows $W'$ for those that stay, so that its output on
        the inputs $X$ that it meets in the whole model changes least: with $H = X^\top X$ summed over all batches,
        $W' = W_k + (H_{kk} + \lambda I)^{-1} H_{kr} W_r$ for the channels $k$ that are kept and the removed ones $r$.
        Nothing is trained, and no labels are needed.

        Products and convolutions are fitted that read a kernel as it is, those in scans, too. One warning names the
        leaves that are left out, such as a tied embedding, of which data look up rows. Zeros among the rows that stay
        do not stay zero.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          batches: any iterable of batches. A tuple holds the inputs, after the state if there is one; anything else
            is the only input.
          damping: $\lambda$ as a share of the mean of the diagonal of $H_{kk}$: more holds the rows nearer to what they
            were. Ten times as much is taken where it is not enough, with a warning.
          sequential: fit a kernel to what it meets once those before it are fitted; the batches are held meanwhile. By
            default all are fitted to the whole model, in one pass.
          allow_inexact: as in `shrink`.
          progress: show a progress bar, if stderr is a terminal and rich is installed.

        Returns:
          The parameters of the smaller model, for `small_apply`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; or a batch does not fit the model, or values are
            not finite.

        >>> import jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> params = {'up': jnp.array([[1.0, 2.0]]), 'down': jnp.ones((2, 1))}
        >>> x = jnp.array([[1.0], [2.0]])
        >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, x)
        >>> small = graph.refit(params, {'up[1]': [0]}, [x], damping=0.0)
        >>> small['down'].tolist()  # the channel that goes is twice the one that stays
        [[3.0]]
        """
        ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), self.model.params)
        fitted = refitting.refit(
            self.model.apply_fn,
            params,
            self.zeroed(ones, keep, allow_inexact),
            batches,
            damping=damping,
            sequential=sequential,
            progress=progress,
        )
        return self.shrink(fitted, keep, allow_inexact)

    def zero_channels(self, tree: tree_lib.PyTree) -> dict[str, np.ndarray]:
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
        found = {}
        for name, is_zero in self._zero_flags(tree).items():
            in_all = is_zero.reshape(-1, is_zero.shape[-1]).all(axis=0)
            if in_all.any():
                found[name] = np.flatnonzero(in_all)
        return found

    def nonzero_channels(self, tree: tree_lib.PyTree) -> dict[str, np.ndarray]:
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

    def old_numbers(
        self,
        keep: Keep,
        small_fn: Callable[..., Any] | None = None,
        allow_inexact: bool = False,
        *,
        of: Callable[..., Any] | None = None,
    ) -> OldNumbers:
        """Lists the numbers in the smaller program that come from an old width, such as `1 / width`, with their lines.

        With the function of a module that was built with the new widths, both programs are traced, and compared
        operation by operation: what differs is exactly these numbers. Without it, numbers are listed that meet a cut
        axis, or a sum over one, and have the value of its old width, of its root, or of the inverse of either.

        Args:
          keep: as in `shrink`.
          small_fn: the function of a module with the new widths, for parameters that `shrink` returned.
            `constructor_arguments` finds with which arguments to build it.
          allow_inexact: as in `shrink`.
          of: as in `small_apply`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; or what `small_fn` raises for the parameters.

        >>> import jax, jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> def apply(p, x):
        ...     h = x @ p['up']
        ...     return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) @ p['down']
        >>> params = {'up': jnp.ones((2, 8)), 'down': jnp.ones((8, 1))}
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> (number,) = graph.old_numbers({'up[1]': range(4)}, apply).numbers
        >>> number.primitive, float(number.old), float(number.new), number.groups
        ('div', 8.0, 4.0, ('up[1]',))
        """
        cut = check_keep(self.groups, keep, allow_inexact)
        return find_old_numbers(self, cut, small_fn, self.model.number_of(of))

    def _zero_flags(self, tree: tree_lib.PyTree) -> dict[str, np.ndarray]:
        nonzero = zero_channels.nonzero_weights(self.trace, tree)
        return zero_channels.find(self.traces, self.groups.values(), nonzero)

    def fold(
        self,
        small_params: tree_lib.PyTree,
        keep: Keep,
        small_fn: Callable[..., Any],
        allow_inexact: bool = False,
        *,
        weights_only: bool = False,
        of: Callable[..., Any] | None = None,
    ) -> Folded:
        """Scales parameters so that a module of the new widths gives what the smaller program gives.

        Factors are followed through the program. An RMSNorm over D' channels in place of D has a mean that is D / D'
        times as large; its scale takes up the square root of that, and the module needs an epsilon that is D / D'
        times as large, too. A query kernel takes up the difference of `1 / sqrt(d)`. Of a LayerNorm nothing takes up
        the mean that is subtracted.

        Args:
          small_params: what `shrink` returned.
          keep: as in `shrink`.
          small_fn: as in `old_numbers`.
          allow_inexact: as in `shrink`.
          weights_only: leave epsilons as they are. Where all that is added to a residual stream can be scaled, such as
            kernels and biases, they then need no change.
          of: as in `small_apply`.

        Returns:
          The parameters, what they were multiplied by, which constants the module still has to get, and the numbers
          that nothing takes up.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; ValueError if the module's program differs in
            more than numbers.

        >>> import jax, jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> def apply(p, x):
        ...     h = x @ p['up']
        ...     h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p['scale']
        ...     return jnp.tanh(h @ p['down'])
        >>> params = {'up': jnp.ones((2, 8)), 'scale': jnp.ones(8), 'down': jnp.ones((8, 1))}
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> keep = {'up[1]': range(4)}
        >>> folded = graph.fold(graph.shrink(params, keep), keep, apply)
        >>> {name: round(factor, 4) for name, factor in folded.factors.items()}
        {'scale': 1.4142}
        >>> (epsilon,) = folded.constants
        >>> print(f'{epsilon.old:.2g} has to be {epsilon.new:.2g}')
        1e-06 has to be 2e-06
        """
        old_numbers = self.old_numbers(keep, small_fn, allow_inexact, of=of)
        trace = self.traces[self.model.number_of(of)]
        return fold(trace, old_numbers, small_params, weights_only)

    def compare(
        self,
        params: tree_lib.PyTree,
        keep: Keep,
        small_fn: Callable[..., Any],
        *inputs: Any,
        state: tree_lib.PyTree | None = None,
        folded: Folded | None = None,
        allow_inexact: bool = False,
    ) -> SourceComparison:
        """Compares a module of the new widths with the smaller model, for the first program.

        They are equal if the results are, and no number of an old width is left. Otherwise these numbers are listed,
        with the difference of the results beside the change that the cut makes.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          small_fn: as in `old_numbers`.
          *inputs: arrays.
          state: as in `verify`.
          folded: what `fold` returned; without it the module gets the parameters as they are.
          allow_inexact: as in `shrink`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`.

        >>> import jax, jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> def apply(p, x):
        ...     return jnp.mean(x @ p['up'], -1, keepdims=True) @ p['down']
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((1, 1))}
        >>> x, keep = jnp.ones((5, 2)), {'up[1]': [0, 1]}
        >>> graph = channel_groups(apply, params, x)
        >>> graph.compare(params, keep, apply, x).verdict
        'different'
        >>> folded = graph.fold(graph.shrink(params, keep), keep, apply)
        >>> graph.compare(params, keep, apply, x, folded=folded).verdict
        'equal'
        """
        own: ModelProgram = self.model.programs[0]
        whole = [params] if state is None else [params, state]
        small = [self.shrink(tree, keep, allow_inexact, verify=False) for tree in whole]
        source = small if folded is None else [folded.params, *small[1:]]
        versions = [(*trees, *inputs) for trees in (whole, small, source)]
        old_numbers = self.old_numbers(keep, small_fn, allow_inexact)
        numbers = old_numbers.numbers if folded is None else folded.constants + folded.left
        with jax.default_matmul_precision('highest'):
            program = ModelProgram.of(own.apply_fn, state, inputs)
            graph = self.model.with_program(0, params, program)
            small_apply = SmallApply(graph, 0, keep, allow_inexact)
            verification = compare_with_source(own.apply_fn, small_apply, small_fn, versions)
        return SourceComparison(verification, numbers, old_numbers.other_difference)

    def explain(self, leaf: tree_lib.Path | str, axis: int) -> str:
        """Says what is known of an axis of a leaf: its groups, or why it stays and what it is tied to.

        Args:
          leaf: its path, as a tuple or as text.
          axis: of the leaf; negative ones count from the end.

        Raises:
          KeyError: there is no such leaf.
          ValueError: it has no such axis.
        """
        return graph_texts.explain(self, leaf, axis)

    def __repr__(self) -> str:
        exact = sum(group.exact for group in self.groups.values())
        return (
            f'ChannelGraph({len(self.groups)} groups, {exact} of them exact, {len(self.pinned)} pinned axes, '
            f'{len(self.unused)} unused leaves)'
        )

    def __str__(self) -> str:
        return graph_texts.table(self)
