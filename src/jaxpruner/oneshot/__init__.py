"""Models pruned once: trained ones by what their inputs do, untrained ones by derivatives of a loss.

Calibrated pruning speaks of four things. `WeightMatrices` say where a model reads a leaf as matrices, and how.
`CalibratedMatrices` are these with the statistics of their inputs. A `Block` holds the matrices that are pruned
together when blocks are pruned in turn. `PrunedLeaves` are the parameters while they are changed in place.
"""

from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning as CalibratedPruning
from jaxpruner.oneshot.calibration import CalibratedMatrices as CalibratedMatrices
from jaxpruner.oneshot.calibration import Calibration as Calibration
from jaxpruner.oneshot.calibration import calibrate as calibrate
from jaxpruner.oneshot.grasp import GraSP as GraSP
from jaxpruner.oneshot.input_statistics import InputStatistics as InputStatistics
from jaxpruner.oneshot.matrices import MatrixLayout as MatrixLayout
from jaxpruner.oneshot.matrix_scores import ria_scores as ria_scores
from jaxpruner.oneshot.matrix_scores import wanda_scores as wanda_scores
from jaxpruner.oneshot.one_call import prune as prune
from jaxpruner.oneshot.owl import outlier_shares as outlier_shares
from jaxpruner.oneshot.owl import owl_sparsities as owl_sparsities
from jaxpruner.oneshot.pruning_at_initialization import (
    PruningAtInitialization as PruningAtInitialization,
)
from jaxpruner.oneshot.ria import RIA as RIA
from jaxpruner.oneshot.snip import SNIP as SNIP
from jaxpruner.oneshot.sparsegpt import SparseGPT as SparseGPT
from jaxpruner.oneshot.sparsegpt_matrices import prune_by_sparsegpt as prune_by_sparsegpt
from jaxpruner.oneshot.synflow import SynFlow as SynFlow
from jaxpruner.oneshot.wanda import Wanda as Wanda
