"""The methods of a `ChannelGraph` that make the smaller model, and compare it with the whole one."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxpruner.core.tree import PyTree
from jaxpruner.structure import refitting
from jaxpruner.structure.cutting import trees
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
from jaxpruner.structure.cutting.small_model import SmallApply
from jaxpruner.structure.cutting.verifying import Verification, Versions, verify
from jaxpruner.structure.graph.record import GraphRecord
from jaxpruner.structure.programs import ModelProgram


class CuttingMethods(GraphRecord):
    """Cuts trees along, and runs the program at the smaller shapes."""

    def shrink(
        self,
        tree: PyTree,
        keep: KeepByGroup,
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
        can_verify = bool(cut.lists) and self.model.are_params(tree)
        if verify and can_verify and not allow_inexact:
            self._check_examples(tree, keep)
        return trees.shrink(tree, self.traces, cut)

    def zeroed(self, tree: PyTree, keep: KeepByGroup, allow_inexact: bool = False) -> Any:
        """As `shrink`, but what belongs to removed channels is set to zero, and all shapes stay."""
        cut = check_keep(self.groups, keep, allow_inexact)
        return trees.zeroed(tree, self.traces, cut)

    def expand(self, tree: PyTree, keep: KeepByGroup, allow_inexact: bool = False) -> Any:
        """The inverse of `shrink`: what stayed gets back to its place, with zeros for what was removed."""
        cut = check_keep(self.groups, keep, allow_inexact)
        return trees.expand(tree, self.traces, cut)

    def small_apply(
        self,
        keep: KeepByGroup,
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
        number = self.model.number_of(of)
        return SmallApply(self, number, keep, allow_inexact)

    def verify(
        self,
        params: PyTree,
        keep: KeepByGroup,
        *inputs: Any,
        state: PyTree | None = None,
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
        traced: ModelProgram = self.model.programs[number]
        if traced.has_state != (state is not None):
            expected = 'a state: give state=' if traced.has_state else 'no state'
            raise TypeError(f'{traced.name} takes {expected}')
        whole = [params] if state is None else [params, state]
        zeroed = [self.zeroed(tree, keep, allow_inexact) for tree in whole]
        small = [self.shrink(tree, keep, allow_inexact, verify=False) for tree in whole]
        versions = Versions(
            whole=(*whole, *inputs),
            zeroed=(*zeroed, *inputs),
            small=(*small, *inputs),
        )
        with jax.default_matmul_precision('highest'):
            program = ModelProgram.of(traced.apply_fn, state, inputs)
            graph = self.model.with_program(number, params, program)
            small_apply = SmallApply(graph, number, keep, allow_inexact)
            return verify(traced.apply_fn, small_apply, versions)

    def _check_examples(self, params: PyTree, keep: KeepByGroup) -> None:
        """Compares the smaller model with the zeroed one, in each program with arrays for arguments."""
        for program in self.model.programs:
            if program.examples is None:
                continue
            state, inputs = program.split(program.examples)
            if not program.has_state:
                state = None
            apply_fn = program.apply_fn
            verification = self.verify(params, keep, *inputs, state=state, of=apply_fn)
            if verification.verdict == 'different':
                where = f' in {program.name}' if self.others else ''
                raise ValueError(
                    f'the smaller model differs from the whole one with zeros{where} ({verification}); groups whose '
                    'removal differs are found one by one with graph.verify, and verify=False cuts all the same'
                )

    def refit(
        self,
        params: PyTree,
        keep: KeepByGroup,
        batches: Iterable[Any],
        *,
        damping: float = refitting.DAMPING,
        sequential: bool = False,
        allow_inexact: bool = False,
        progress: bool = True,
    ) -> PyTree:
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

        def ones_of(leaf: Any) -> np.ndarray:
            return np.ones(leaf.shape, np.float32)

        ones = jax.tree.map(ones_of, self.model.params)
        stays = self.zeroed(ones, keep, allow_inexact)
        fitted = refitting.refit(
            self.model.apply_fn,
            params,
            stays,
            batches,
            damping=damping,
            sequential=sequential,
            progress=progress,
        )
        return self.shrink(fitted, keep, allow_inexact)
