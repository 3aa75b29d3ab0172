"""`jaxpruner run WORKLOAD`: trains one model with one algorithm."""

import dataclasses

from jaxpruner.cli.compare import Options, sweep


@dataclasses.dataclass(frozen=True)
class Run(Options):
    """Train one model of a workload with one algorithm, sparsity and seed.

    OUT receives the recipe, the result (cells/), metrics over time (metrics/) and masks over time (masks/). The same
    command goes on where an interrupted one stopped; what has finished is not run again.

    Examples:
      jaxpruner run resnet --algorithm rigl --sparsity 0.9
      jaxpruner run lenet --preset data --data-dir mnist --algorithm set
      jaxpruner run vit --set steps=2000 optimizer.learning_rate=1e-3 --print-recipe

    >>> Run('resnet', algorithm='set').sparsity
    0.8
    """

    algorithm: str = 'magnitude'
    """Name of the algorithm; no_prune trains the dense model."""
    sparsity: float = 0.8
    """Share of the weights to remove, in [0, 1]."""
    seed: int = 0
    """Of initial weights, batches and random masks."""

    def run(self) -> int:
        """Trains, and prints the result; returns the exit status."""
        return sweep(self, (self.algorithm,), (self.sparsity,), (self.seed,))
