"""`jaxpruner order`: whether algorithms come in the order of the original's table."""

import collections
import dataclasses

from jaxpruner.cli import arguments
from jaxpruner.cli.table import read_folders
from jaxpruner.report.differences import OrderCheck, check_original_order
from jaxpruner.report.original import SPARSITY


@dataclasses.dataclass(frozen=True)
class Order:
    """Compares the order of algorithms with the table that the original JaxPruner published, pair by pair.

    A pair agrees when the algorithm that is better there is better here, in the mean over the seeds that both have. It
    contradicts when the 95 % interval of the paired difference leaves no doubt that it is worse; else it differs by no
    more than chance explains.

    Examples:
      jaxpruner order out/resnet out/vit
      jaxpruner order out/resnet --sparsity 0.95 --all
    """

    results: arguments.Folders = ()
    """Folders of results, as `jaxpruner compare` leaves them."""
    sparsity: float = SPARSITY
    """Of the results; the original's is 0.8."""
    all: bool = False
    """Print every pair, not only those that contradict."""

    def run(self) -> None:
        """Prints a line for each row of the original's table, and the pairs below it."""
        rows: dict[tuple[str, str], list[OrderCheck]] = collections.defaultdict(list)
        for check in check_original_order(read_folders(self.results), self.sparsity):
            rows[check.label, check.row].append(check)
        for (label, row), checks in rows.items():
            numbers = collections.Counter(check.verdict for check in checks)
            print(
                f'{label} against {row}: of {len(checks)} pairs {numbers["agrees"]} agree, {numbers["differs"]} differ '
                f'by no more than chance, {numbers["contradicts"]} contradict'
            )
            for check in checks:
                if self.all or check.verdict == 'contradicts':
                    print(f'  {check}')
