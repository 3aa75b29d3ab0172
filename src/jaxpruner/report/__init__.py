"""Results of runs as tables and plots: folders that `jaxpruner compare` left, and what a loop of one's own recorded."""

from jaxpruner.report.experiments import Difference as Difference
from jaxpruner.report.experiments import Experiment as Experiment
from jaxpruner.report.experiments import group_cells as group_cells
from jaxpruner.report.experiments import paired_difference as paired_difference
from jaxpruner.report.history import MaskCounts as MaskCounts
from jaxpruner.report.history import MaskHistory as MaskHistory
from jaxpruner.report.history import plot_layers as plot_layers
from jaxpruner.report.history import plot_schedule as plot_schedule
from jaxpruner.report.masks import animate_masks as animate_masks
from jaxpruner.report.masks import n_by_m_axes as n_by_m_axes
from jaxpruner.report.masks import plot_masks as plot_masks
from jaxpruner.report.plots import plot_layer_sparsity as plot_layer_sparsity
from jaxpruner.report.plots import plot_metric_against_sparsity as plot_metric_against_sparsity
from jaxpruner.report.results import Cell as Cell
from jaxpruner.report.results import read_cells as read_cells
from jaxpruner.report.results import write_cell as write_cell
from jaxpruner.report.tables import to_markdown as to_markdown
from jaxpruner.report.tables import to_text as to_text
