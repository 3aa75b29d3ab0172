"""`jaxpruner run WORKLOAD`: trains one model with one algorithm."""

import dataclasses

from jaxpruner.cli.options import TrainingOptions


@dataclasses.dataclass(frozen=True)
class Run(TrainingOptions):
    """Train one model of a workload with one algorithm, sparsity and seed.

    OUT receives the recipe, the result (cells/), metrics over time (metrics/) and masks over time (masks/). The same
    command goes on where an interrupted one stopped; what has finished is not run again.

    Examples:
      jaxpruner run resnet --algorithm rigl --sparsity 0.9
      jaxpruner run lenet --preset data --data-dir mnist --algorithm set
      jaxpruner run vit --set steps=2000 optimizer.learning_rate=1e-3 --print-recipe
    """

    algorithm: str = 'magnitude'
    """Name of the algorithm; no_prune trains the dense model."""
    sparsity: float = 0.8
    """Share of the weights to remove, in [0, 1]."""
    seed: int = 0
    """Of initial weights, batches and random masks."""

    def run(self) -> int:
        """Trains, and prints the result; returns the exit status."""
        from jaxpruner.cli import training  # loads flax and orbax, for which --help need not wait

        return training.sweep(self, (self.algorithm,), (self.sparsity,), (self.seed,))
