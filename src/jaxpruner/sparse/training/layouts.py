"""How the matrices of a leaf are stored in blocks: how many blocks, of which shape, with how many weights."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxpruner.sparse.operators.block_layout import BlockShape

# A group keeps whole blocks, and at least one. A leaf has a surplus if it keeps more than this factor times the weights
# that were asked for.
_MOST_KEPT = 1.5


class NoLayoutError(ValueError):
    """A matrix cannot be stored as was asked; the text is the reason, without the name of the leaf."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The blocks of a leaf.

    Attributes:
      layers: lengths of the axes along which there are several matrices; () for one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
      block: inputs and outputs of a block.
      blocks: how many blocks each group of outputs stores.
      rank: the rank of the term of low rank, 0 for none.
    """

    layers: tuple[int, ...]
    inputs: int
    outputs: int
    block: BlockShape
    blocks: int
    rank: int = 0

    @property
    def groups(self) -> int:
        """The number of groups. A group is `block[1]` neighbouring outputs; the last one may be padded."""
        return -(-self.outputs // self.block[1])

    @property
    def candidates(self) -> int:
        """The number of blocks of inputs from which each group chooses; the last one may be padded."""
        return -(-self.inputs // self.block[0])

    @property
    def positions_shape(self) -> tuple[int, ...]:
        """The shape of the positions of stored blocks."""
        return *self.layers, self.groups, self.blocks

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of the weights in stored blocks."""
        return *self.positions_shape, *self.block

    @property
    def topology_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays that say where its blocks are, by name."""
        return {'positions': self.positions_shape}

    @property
    def candidates_shape(self) -> tuple[int, ...]:
        """The shape of an array with a number for each block that could be stored."""
        return *self.layers, self.groups, self.candidates

    @property
    def size(self) -> int:
        """Weights of the dense leaf."""
        return math.prod(self.layers) * self.inputs * self.outputs

    @property
    def low_rank_size(self) -> int:
        """Weights of the term of low rank."""
        matrices = math.prod(self.layers)
        return matrices * self.rank * (self.inputs + self.outputs)

    @property
    def words(self) -> str:
        """How a plan describes it."""
        height, width = self.block
        words = (
            f'{self.groups} groups of {self.blocks} of {self.candidates} blocks {height}×{width}'
        )
        return f'{words}, rank {self.rank}' if self.rank else words

    @property
    def input_coverage(self) -> float:
        """The largest share of the inputs that blocks can reach; 1 with a term of low rank, which reaches all."""
        if self.rank:
            return 1.0
        stored = self.groups * self.blocks
        return min(1.0, stored / self.candidates)

    @property
    def kept_share(self) -> float:
        """The share of the weights that is kept, if no block is padded."""
        shape = self.inputs, self.outputs
        return self.blocks / self.candidates + _low_rank_share(shape, self.rank)

    def block_sizes(self) -> np.ndarray:
        """Weights of each block that are not padding: int[groups, candidates]."""
        inputs = _lengths(self.inputs, self.block[0])
        outputs = _lengths(self.outputs, self.block[1])
        return np.outer(outputs, inputs)

    def kept(self, positions: np.ndarray) -> int:
        """Weights in these blocks `[*layers, groups, blocks]`, and in the term of low rank, without padding."""
        sizes = np.broadcast_to(self.block_sizes(), self.candidates_shape)
        stored_sizes = np.take_along_axis(sizes, positions, -1)
        return int(stored_sizes.sum()) + self.low_rank_size


def _lengths(size: int, length: int) -> np.ndarray:
    """The lengths of the parts of an axis; the last may be shorter."""
    starts = np.arange(0, size, length)
    return np.minimum(size - starts, length)


def _low_rank_share(shape: tuple[int, int], rank: int) -> float:
    """The weights of a term of low rank, as a share of those of the matrix."""
    inputs, outputs = shape
    return rank * (inputs + outputs) / (inputs * outputs)


def has_surplus(layout: Layout, sparsity: float) -> bool:
    """Whether blocks are so coarse that many more weights are kept than were asked for."""
    return layout.kept_share > _MOST_KEPT * (1 - sparsity)


def layout_for(
    layers: Sequence[int], shape: tuple[int, int], block: BlockShape, sparsity: float, rank: int = 0
) -> Layout:
    """The layout that comes nearest to a sparsity; the weights of the term of low rank count, too.

    Raises:
      NoLayoutError: the block is larger than the matrix, or the term of low rank alone has too many weights.

    >>> layout_for((), (64, 256), (8, 128), sparsity=0.75).blocks
    2
    """
    inputs, outputs = shape
    if block[0] > inputs or block[1] > outputs:
        raise NoLayoutError(
            f'a matrix of {inputs} inputs and {outputs} outputs is smaller than a block of {block[0]} x {block[1]}'
        )
    layout = Layout(tuple(layers), inputs, outputs, block, blocks=1, rank=rank)
    share = 1 - sparsity - _low_rank_share(shape, rank)
    if rank and share <= 0:
        weights_to_keep = (1 - sparsity) * inputs * outputs
        most = math.ceil(weights_to_keep / (inputs + outputs)) - 1
        raise NoLayoutError(
            f'a term of rank {rank} has more weights than sparsity {sparsity} leaves of {inputs} x {outputs}; '
            f'the rank can be at most {most}'
        )
    blocks = round(share * layout.candidates)
    blocks = max(1, min(blocks, layout.candidates))
    return dataclasses.replace(layout, blocks=blocks)
