"""`jaxpruner compare WORKLOAD`: trains a workload with many algorithms, sparsities and seeds, and prints the table."""

import dataclasses

from jaxpruner.cli import arguments
from jaxpruner.cli.options import TrainingOptions

# The columns of the original's table.
_ALGORITHMS = (
    'no_prune',
    'random',
    'magnitude',
    'saliency',
    'global_magnitude',
    'magnitude_ste',
    'static_sparse',
    'set',
    'rigl',
)


@dataclasses.dataclass(frozen=True)
class Compare(TrainingOptions):
    """Train a workload with every algorithm at every sparsity with every seed, and print the table.

    All seeds and sparsities of an algorithm are trained by one compiled program. With the same seed every algorithm
    begins with the same weights and sees the same batches. Ctrl-C keeps what is done, and the same command goes on
    there; further algorithms, sparsities and seeds can be added later.

    Examples:
      jaxpruner compare digits-resnet --plots
      jaxpruner compare vit --algorithms no_prune rigl --sparsities 0.8 0.95
      jaxpruner compare mnist-resnet --data-dir mnist
    """

    algorithms: arguments.Names = _ALGORITHMS
    """Names of algorithms; no_prune is the dense model."""
    sparsities: arguments.Shares = (0.8,)
    """Shares of the weights to remove, in [0, 1]."""
    seeds: arguments.Numbers = (0, 1, 2)
    """Of initial weights, batches and random masks."""

    def run(self) -> int:
        """Trains, and prints the table; returns the exit status."""
        from jaxpruner.cli import training  # loads flax and orbax, for which --help need not wait

        return training.sweep(self, self.algorithms, self.sparsities, self.seeds)
