"""Calibrated pruning of trained models: what inputs do decides which weights go, and how the others make up for it."""

from jaxpruner.oneshot.input_statistics import InputStatistics as InputStatistics
from jaxpruner.oneshot.matrices import MatrixLayout as MatrixLayout
from jaxpruner.oneshot.owl import outlier_shares as outlier_shares
from jaxpruner.oneshot.owl import owl_sparsities as owl_sparsities
from jaxpruner.oneshot.ria import ria_scores as ria_scores
from jaxpruner.oneshot.sparsegpt import prune_by_sparsegpt as prune_by_sparsegpt
from jaxpruner.oneshot.wanda import wanda_scores as wanda_scores
