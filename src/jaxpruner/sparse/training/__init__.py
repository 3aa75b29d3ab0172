"""Models that are trained on compact weights: blocks, or single weights in CSR.

Only stored weights have values and moments. The zeros inside of blocks are still multiplied. With CSR, the backward
pass still computes the dense gradient of each matrix.

The files, from the bottom up:

    layouts          how a matrix is stored in blocks, and how many weights that are
    only_setting     the setting `only`: which leaves are meant
    choosing         which leaves are trained in blocks, in which blocks, and why others stay dense
    block_positions  which blocks are stored: at first, and after some were dropped and others grown
    conversion       between the leaf of a dense model and what is stored of it
    growing          by which scores blocks are grown: a row for each algorithm
    moving           when blocks are dropped and grown, and how many
    plans            what becomes of each leaf, as a table
    compact_models   what all models do: apply, unpack, masks, update
    models           the model in blocks
    making           all of it in one call

unstructured_positions, unstructured_models and unstructured do the same for single weights.
"""

from jaxpruner.sparse.training.making import block_sparse as block_sparse
from jaxpruner.sparse.training.models import BlockSparse as BlockSparse
from jaxpruner.sparse.training.plans import BlockPlan as BlockPlan
from jaxpruner.sparse.training.plans import PlannedLeaf as PlannedLeaf
from jaxpruner.sparse.training.unstructured import unstructured_sparse as unstructured_sparse
from jaxpruner.sparse.training.unstructured_models import (
    UnstructuredSparse as UnstructuredSparse,
)
