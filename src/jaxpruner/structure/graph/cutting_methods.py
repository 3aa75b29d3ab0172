"""`shrink`, `zeroed`, `expand`, `small_apply`, `verify` and `refit`: the smaller model, compared with the whole one."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxpruner.structure import refitting
from jaxpruner.structure.cutting import trees
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
from jaxpruner.structure.cutting.small_model import SmallApply
from jaxpruner.structure.cutting.verifying import Verification, Versions, verify
from jaxpruner.structure.graph.record import GraphRecord
from jaxpruner.structure.programs import ModelProgram
from jaxpruner.tree import PyTree


class CuttingMethods(GraphRecord):
    """Cuts trees, and runs the program at the smaller shapes."""

    def shrink(
        self,
        tree: PyTree,
        keep: KeepByGroup,
        allow_inexact: bool = False,
        *,
        verify: bool = True,
    ) -> Any:
        """Cuts a tree: removed channels are left out of all its arrays.

        Args:
          tree: the parameters, or a tree of their structure such as masks (packed or not), averages or gradients; the
            state of the model; or a state of an optimizer, wrapped or not. Packed masks are packed anew. The batch of a
            cache may have another size.
          keep: name of a group -> the indices of its channels that stay, ascending. Where `Group.lists` has atoms, it
            may also be an array with such a list for each layer of a scan, expert or head, all of one length. Groups
            that are not named stay whole.
          allow_inexact: whether to cut groups for which this is not the same as zeroing them.
          verify: compare the smaller model with the zeroed one, as the method `verify` does. For each program of
            the model this compiles two programs, and runs three times. It is left out if inexact groups are allowed, if
            the tree cannot be the parameters (arrays of their structure and dtypes), or if the graph was made without
            arrays for inputs.

        Returns:
          The tree with smaller arrays, on the devices where they are.

        Raises:
          TypeError: `keep` is no mapping, or indices are no whole numbers.
          KeyError: there is no such group.
          IndexError: a group has no such index.
          ValueError: indices are missing, repeated or not in order; a group is not exact; an array is none of those
            above, such as factored moments; or the smaller model differs from the zeroed one.

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
        """As `shrink`, but removed channels are set to zero, and all shapes stay."""
        cut = check_keep(self.groups, keep, allow_inexact)
        return trees.zeroed(tree, self.traces, cut)

    def expand(self, tree: PyTree, keep: KeepByGroup, allow_inexact: bool = False) -> Any:
        """The inverse of `shrink`: kept channels go back to their places, with zeros for the removed ones."""
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

        It can be compiled, differentiated, mapped over and trained as the model can. Derivative rules of
        `jax.custom_jvp` and `jax.custom_vjp` stay. A rule that cannot be followed is an error when a derivative is
        taken. Numbers that were computed from an old width, such as `1 / width`, stay as they were; `old_numbers` lists
        them. For inputs of other shapes the model is traced anew. Callbacks that only show something are left out.

        Args:
          keep: as in `shrink`.
          allow_inexact: as in `shrink`.
          of: the function of the program, if it is not the first one.

        Returns:
          `(params, *inputs) -> results`, or `(params, state, *inputs) -> results`, for parameters and a state that
          `shrink` returned. The state in the results is a small one, too.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; ValueError if there is no such program. When
            called it raises ValueError for parameters or a state of other shapes.

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
        """Compares the smaller model with the zeroed one, the whole model whose removed channels are zero.

        The error is compared with the change that the removal makes. If the removal changes nothing, nothing is proven.
        Both models run with matrix products at full precision, for which the model is traced anew.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          *inputs: arrays.
          state: of the whole model, arrays. The state in the results is compared, too, without removed channels.
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
        """Compares the smaller model with the zeroed one, in each program that was given arrays as arguments."""
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
                    f'the smaller model differs from the whole one with zeros{where} ({verification}); find '
                    'the groups that differ one by one with graph.verify, or cut all the same with verify=False'
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
        r"""Fits parameters to calibration inputs by least squares, and then shrinks them.

        A kernel $W$ that sums over removed channels gets new rows $W'$ for the channels that stay. They are chosen such
        that its output changes least on the inputs $X$ that it gets in the whole model. With $H = X^\top X$ summed over
        all batches, they are $W' = W_k + (H_{kk} + \lambda I)^{-1} H_{kr} W_r$ for the kept channels $k$ and the
        removed ones $r$. Nothing is trained, and no labels are needed.

        Fitted are products and convolutions that read a kernel as it is, also in scans. One warning names the leaves
        that are left out, such as a tied embedding whose rows data look up. Zeros in the rows that stay do not stay
        zero.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          batches: any iterable of batches. A tuple holds the inputs, after the state if there is one; anything else
            is the only input.
          damping: $\lambda$ as a share of the mean of the diagonal of $H_{kk}$. A larger one keeps the rows nearer to
            the old ones. Where it is not enough, ten times as much is taken, with a warning.
          sequential: fit a kernel to the inputs that it gets once the kernels before it are fitted. The batches are
            held meanwhile. By default all kernels are fitted to the whole model, in one pass.
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
        >>> small['down'].tolist()  # the removed channel is twice the kept one
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
