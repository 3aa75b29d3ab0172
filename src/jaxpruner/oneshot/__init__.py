"""Calibrated pruning of trained models: what inputs do decides which weights go, and how the others make up for it."""

from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning as CalibratedPruning
from jaxpruner.oneshot.calibration import CalibratedMatrices as CalibratedMatrices
from jaxpruner.oneshot.calibration import Calibration as Calibration
from jaxpruner.oneshot.calibration import calibrate as calibrate
from jaxpruner.oneshot.input_statistics import InputStatistics as InputStatistics
from jaxpruner.oneshot.matrices import MatrixLayout as MatrixLayout
from jaxpruner.oneshot.owl import outlier_shares as outlier_shares
from jaxpruner.oneshot.owl import owl_sparsities as owl_sparsities
from jaxpruner.oneshot.pruners import RIA as RIA
from jaxpruner.oneshot.pruners import SparseGPT as SparseGPT
from jaxpruner.oneshot.pruners import Wanda as Wanda
from jaxpruner.oneshot.pruners import prune as prune
from jaxpruner.oneshot.ria import ria_scores as ria_scores
from jaxpruner.oneshot.sparsegpt import prune_by_sparsegpt as prune_by_sparsegpt
from jaxpruner.oneshot.wanda import wanda_scores as wanda_scores
