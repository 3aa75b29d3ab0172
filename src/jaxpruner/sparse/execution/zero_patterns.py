"""Where the matrices of a leaf are zero, and what that means for formats; all with NumPy."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping

import numpy as np

from jaxpruner.sparse.operators.block_layout import BlockShape

# From wide to narrow outputs: wide blocks multiply faster.
_BLOCK_OUTPUTS = (512, 256, 128, 64, 32)
_BLOCK_INPUTS = (64, 32, 16, 8, 4, 2, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class ZeroPattern:
    """Where matrices are not zero.

    Attributes:
      nonzero: bool[layers, inputs, outputs].
    """

    nonzero: np.ndarray

    @classmethod
    def of(cls, matrices: np.ndarray) -> 'ZeroPattern':
        """The pattern of matrices `[*layers, inputs, outputs]`."""
        *_, inputs, outputs = matrices.shape
        nonzero = np.not_equal(matrices, 0)
        return cls(nonzero.reshape(-1, inputs, outputs))

    @property
    def inputs(self) -> int:
        """Rows of a matrix."""
        return self.nonzero.shape[1]

    @property
    def outputs(self) -> int:
        """Columns of a matrix."""
        return self.nonzero.shape[2]

    @functools.cached_property
    def density(self) -> float:
        """The share of the weights that are not zero."""
        return float(self.nonzero.mean()) if self.nonzero.size else 0.0

    @functools.cached_property
    def weights(self) -> int:
        """The most nonzero weights that a layer has, at least one."""
        return largest_count(self.nonzero.sum((1, 2)))

    @functools.cached_property
    def n_by_m(self) -> str | None:
        """N:M along the inputs, such as `'2:4'`, if each group has at most N weights and nearly all have N.

        >>> ZeroPattern(np.tile([[True], [True], [False], [False]], (1, 2, 3))).n_by_m
        '2:4'
        """
        for m in (4, 8, 16, 32):
            if self.inputs % m:
                break
            counts = self.nonzero.reshape(-1, m, self.outputs).sum(1)
            n = counts.max(initial=0)
            if 0 < n < m and counts.mean() > 0.9 * n:
                return f'{n}:{m}'
        return None

    def used_inputs(self, window: int = 1) -> np.ndarray:
        """Which inputs have a weight that is not zero: bool[layers, inputs].

        With a window of several elements these are channels, `[layers, channels]`: the inputs are the elements of the
        window, each with all channels.
        """
        used = np.any(self.nonzero, axis=2)
        by_window = used.reshape(len(used), window, -1)
        return np.any(by_window, axis=1)

    def used_outputs(self) -> np.ndarray:
        """Which outputs have a weight that is not zero: bool[layers, outputs]."""
        return np.any(self.nonzero, axis=1)

    def blocks(self, block: BlockShape) -> np.ndarray:
        """Which blocks have weights: bool[layers, groups of outputs, blocks of inputs]; edges are padded."""
        block_inputs, block_outputs = block
        lacking_inputs = -self.inputs % block_inputs
        lacking_outputs = -self.outputs % block_outputs
        padding = [(0, 0), (0, lacking_inputs), (0, lacking_outputs)]
        padded = np.pad(self.nonzero, padding)
        layers, inputs, outputs = padded.shape
        candidates = inputs // block_inputs
        groups = outputs // block_outputs
        cut = padded.reshape(layers, candidates, block_inputs, groups, block_outputs)
        has_weights = np.any(cut, axis=(2, 4))
        return np.swapaxes(has_weights, 1, 2)

    def block_share(self, block: BlockShape) -> float:
        """The share of the matrix that blocks take."""
        block_inputs, block_outputs = block
        weights = self.stored_blocks(block) * block_inputs * block_outputs
        return weights / (self.inputs * self.outputs)

    def stored_blocks(self, block: BlockShape) -> int:
        """How many blocks a matrix stores."""
        _, block_outputs = block
        groups = -(-self.outputs // block_outputs)
        return groups * self.blocks_in_group(block)

    def blocks_in_group(self, block: BlockShape) -> int:
        """How many blocks each group stores: the most that any group has, at least one."""
        return largest_count(self.blocks(block).sum(-1))

    def best_blocks(self, largest_cost: float, count: int) -> list[BlockShape]:
        """The shapes of blocks that promise the fastest products, at most `count`.

        The cost of a shape is a rough estimate, in products of the dense matrix. The best shapes are then measured.

        >>> nonzero = np.zeros((1, 64, 256), bool)
        >>> nonzero[:, :8, :128] = nonzero[:, 56:, 128:] = True
        >>> ZeroPattern(nonzero).best_blocks(0.75, count=1)
        [(8, 128)]
        """
        if self.density > largest_cost:
            return []
        costs: dict[BlockShape, float] = {}
        for outputs, inputs in itertools.product(_BLOCK_OUTPUTS, _BLOCK_INPUTS):
            if inputs > self.inputs or outputs > self.outputs:
                continue
            # Narrow groups multiply more slowly, and single inputs are gathered more slowly.
            narrow_factor = 1 + 64 / outputs
            gather_factor = 1 + 0.5 / inputs
            share = self.block_share((inputs, outputs))
            cost = narrow_factor * gather_factor * share
            if cost <= largest_cost:
                costs[inputs, outputs] = cost
        cheapest_first = sorted(costs, key=costs.__getitem__)
        return cheapest_first[:count]


def largest_count(counts: np.ndarray) -> int:
    """The largest count, at least one: arrays that are stored are never empty."""
    largest = int(counts.max(initial=0))
    return max(largest, 1)


def digest(patterns: Mapping[str, ZeroPattern]) -> str:
    """A short name of the zeros of some leaves."""
    hasher = hashlib.sha256()
    for name, pattern in sorted(patterns.items()):
        header = f'{name} {pattern.nonzero.shape}'
        bits = np.packbits(pattern.nonzero)
        hasher.update(header.encode())
        hasher.update(bits.tobytes())
    return hasher.hexdigest()[:16]
