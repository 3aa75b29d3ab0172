"""`jaxpruner table`: results of runs as a table."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxpruner.cli import arguments, output
from jaxpruner.files import atomic_files
from jaxpruner.report import results, tables

_ENDINGS = {'.md': 'markdown', '.csv': 'csv'}


@dataclasses.dataclass(frozen=True)
class Table:
    """Shows results as a table: mean ± standard deviation over seeds, the best sparse value of a row bold.

    A row is a workload at one sparsity, a column an algorithm. Results that were trained with different recipes stand
    in rows of their own. Dense (no_prune) results stand in the rows of every sparsity.

    Examples:
      jaxpruner table out/resnet out/vit
      jaxpruner table out/resnet --out table.md
    """

    results: arguments.Folders = ()
    """Folders of results, as `jaxpruner compare` and `jaxpruner run` leave them."""
    format: Literal['auto', 'markdown', 'csv', 'terminal'] = 'auto'
    """How to write it; auto: as the ending of --out says (.md, .csv), without --out for the terminal."""
    out: arguments.OptionalPath = None
    """A file to write instead of the terminal."""

    @property
    def chosen_format(self) -> str:
        """Chooses the format that is asked for or follows from the file's ending; refuses a wrong combination."""
        chosen = self.format
        if chosen == 'auto':
            chosen = 'terminal' if self.out is None else _ENDINGS.get(self.out.suffix)
        if chosen is None:
            raise ValueError(
                f'--out {self.out}: end it in .md or .csv, or say --format markdown or csv'
            )
        if self.out is not None and chosen == 'terminal':
            raise ValueError(
                '--format terminal cannot go to a file; leave out --out, or say --format markdown or csv'
            )
        return chosen

    def run(self) -> None:
        """Prints the table or writes the file."""
        chosen = self.chosen_format
        table = tables.make_table(read_folders(self.results))
        if chosen == 'terminal':
            output.print_rich(tables.to_rich(table, output.width()))
            return
        text = tables.to_markdown(table) if chosen == 'markdown' else tables.to_csv(table)
        if self.out is None:
            print(text, end='')
        else:
            atomic_files.replace_file(self.out, lambda temporary: temporary.write_text(text))
            print(self.out)


def read_folders(folders: Sequence[Path]) -> list[results.Cell]:
    """Reads the cells of several folders of results.

    Raises:
      ValueError: no folder is named.
      FileNotFoundError: one has no results.
    """
    if not folders:
        raise ValueError('name at least one folder of results')
    cells: list[results.Cell] = []
    for folder in folders:
        cells += results.read_cells(folder)
    return cells
