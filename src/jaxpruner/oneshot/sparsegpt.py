"""SparseGPT: weights are removed input by input, and the others are changed to make up for it."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings, utils
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.cholesky import flipped_cholesky
from jaxpruner.oneshot.input_statistics import first_names
from jaxpruner.oneshot.sparsegpt_matrices import BLOCK_SIZE, prune_by_factors

decompose_in_place = jax.jit(flipped_cholesky, donate_argnums=0)


class _ManyZeros(NamedTuple):
    """Whether the model that is pruned now has more zeros than are asked for. No setting: equality leaves it out."""

    stay: bool
    is_derived_setting = True


@dataclasses.dataclass
class SparseGPT(CalibratedPruning):
    """Removes weights input by input and changes the others to make up for it. Frantar and Alistarh, 2023.

    Attributes:
      damping: what is added to a Gram matrix's diagonal, as a share of its mean; ten times as much where that is not
        enough, with a warning.
      block_size: inputs among which unstructured weights are ranked together, 128 as published; a smaller one spreads
        what is pruned more evenly, a larger one leaves more choice.
      keep_zeros: weights that are zero stay zero, and count as pruned, however many there are. By default they do, with
        a warning, where more of the weights that are to be pruned are zero already than are asked for. With fewer
        zeros, or with `keep_zeros=False`, a zero may get a value to make up for what goes.

    With `masks` from elsewhere (`instant_sparsify(params, masks=masks, apply_fn=…, batches=…)`) the weights that they
    keep are changed in the same way.

    Raises:
      ValueError: a setting is wrong.

    >>> pruner = SparseGPT(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> batches = [jnp.array([[1.0, 1.0], [2.0, 2.0], [1.0, 0.9]])]  # one input can stand for both
    >>> params = {'w': jnp.ones((2, 1))}
    >>> pruned, _ = pruner.instant_sparsify(params, apply_fn=lambda params, x: x @ params['w'], batches=batches)
    >>> pruned['w'].round(1).tolist()
    [[0.0], [2.0]]
    """

    kind: ClassVar[str] = 'gram'

    per: str = 'layer'
    damping: float = 0.01
    block_size: int = BLOCK_SIZE
    keep_zeros: bool | None = None

    # What is decided where `keep_zeros` is `None`, for the model that is pruned now.
    _many_zeros = _ManyZeros(stay=False)

    def begin(self, params, targets):
        """Compares the zeros of the model with what is asked for."""
        if any(target.mask is not None for target in targets.values()):
            if self.keep_zeros is not None:
                raise ValueError('masks say which weights go: leave keep_zeros out')
            return
        if self.keep_zeros is not None:
            return
        zeros, asked, size = 0, 0.0, 0
        for path, leaf in zip(*tree_lib.flatten_with_paths(params)[:2], strict=True):
            if path in targets:
                zeros += leaf.size - utils.count_nonzero(leaf)
                asked += float(targets[path].sparsity) * leaf.size
                size += leaf.size
        self._many_zeros = _ManyZeros(stay=zeros > asked)
        if self._many_zeros.stay:
            caller_warnings.warn(
                f'{zeros / size:.4g} of the weights that are to be pruned are zero already, more than the '
                f'{asked / size:.4g} that are asked for; they stay zero. keep_zeros=True avoids this warning, and '
                'keep_zeros=False lets SparseGPT give them values to make up for others'
            )

    def prepare(self, statistics, donate):
        """Factors the Gram matrices, in their own memory if they are donated."""
        decompose = decompose_in_place if donate else flipped_cholesky
        return decompose(statistics.gram, jnp.float32(self.damping))

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        """Makes new weights and the mask; `prepared` are the factors that `prepare` made."""
        del where
        keep_zeros = self._many_zeros.stay if self.keep_zeros is None else self.keep_zeros
        pruned = prune_by_factors(
            weights,
            prepared,
            sparsity,
            sparsity_type,
            self.per,
            block_size=self.block_size,
            keep_zeros=keep_zeros,
        )
        return pruned.weights, pruned.mask

    def reconstruct_matrices(self, weights, prepared, mask):
        """Makes new weights under a mask from elsewhere; `prepared` are the factors, too."""
        pruned = prune_by_factors(
            weights, prepared, jnp.float32(0), block_size=self.block_size, mask=mask
        )
        return pruned.weights, pruned.mask

    def doubt(self, prepared, where):
        """Names the leaf, where its Gram matrix needed more damping."""
        most = float(jnp.max(prepared.damping, initial=0))
        return f'{where} ({most:.2g} was used)' if most > self.damping * 1.001 else None

    def warn_of_doubts(self, doubts):
        """Warns once of all Gram matrices."""
        if doubts:
            caller_warnings.warn(
                f'Gram matrices could not be decomposed with damping {self.damping}: {first_names(doubts)}; calibrate '
                'with more samples, or set damping'
            )
