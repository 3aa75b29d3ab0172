"""JAX-Pruning's interface: strategies that say what is pruned at which epoch, and the functions that carry them out."""

from jaxpruner.jax_pruning.epochs import initial_masks as initial_masks
from jaxpruner.jax_pruning.epochs import pruning as pruning
from jaxpruner.jax_pruning.epochs import pruning_apply as pruning_apply
from jaxpruner.jax_pruning.strategy import PruningEntry as PruningEntry
from jaxpruner.jax_pruning.strategy import PruningStrategy as PruningStrategy
from jaxpruner.jax_pruning.strategy import gradual_strategy as gradual_strategy
from jaxpruner.jax_pruning.updater import StrategyPruning as StrategyPruning
