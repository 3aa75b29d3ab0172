"""Storage, execution and training on compact weights, in which zeros take no room.

The parts, from the bottom up:

    block_matrix   products of rows with compact matrices, and their derivatives; csr_matrix, too
    products       the products of a traced model with its parameters; the model with operators in their place
    formats        how the zeros of one array are left out: a file for each format
    storage        a tree in its smallest formats, in memory and as a file
    training       models that are trained on compact weights
    execution      the fastest format for each product of a pruned model, by measurement
"""

from jaxpruner.sparse.execution.choosing import ExecutionReport as ExecutionReport
from jaxpruner.sparse.execution.choosing import LayerExecution as LayerExecution
from jaxpruner.sparse.execution.compiling import Compiled as Compiled
from jaxpruner.sparse.execution.compiling import PackedApply as PackedApply
from jaxpruner.sparse.execution.compiling import compile as compile
from jaxpruner.sparse.storage.packed_files import load as load
from jaxpruner.sparse.storage.packed_files import open_packed as open_packed
from jaxpruner.sparse.storage.packed_files import pack as pack
from jaxpruner.sparse.storage.packed_files import save as save
from jaxpruner.sparse.storage.packed_files import unpack as unpack
from jaxpruner.sparse.training.compact_model import BlockPlan as BlockPlan
from jaxpruner.sparse.training.compact_model import CompactModel as CompactModel
from jaxpruner.sparse.training.compact_model import PlannedLeaf as PlannedLeaf
from jaxpruner.sparse.training.compact_model import block_sparse as block_sparse
from jaxpruner.sparse.training.compact_model import unstructured_sparse as unstructured_sparse
