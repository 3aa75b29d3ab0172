"""Products of rows with compact matrices, and their derivatives: plain functions of arrays, a file for each format."""

from jaxpruner.sparse.operators.blocks import BlockMatrix as BlockMatrix
from jaxpruner.sparse.operators.csr import CsrMatrix as CsrMatrix
from jaxpruner.sparse.operators.csr import CsrPattern as CsrPattern
