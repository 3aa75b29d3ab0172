"""`jaxpruner table` and `jaxpruner plot`: results of runs."""

import shutil
from pathlib import Path
from typing import Literal

from jaxpruner import report
from jaxpruner.cli.options import Folders
from jaxpruner.files import atomic_files

_ENDINGS = {'.md': 'markdown', '.csv': 'csv'}


def table(
    results: Folders = (),
    *,
    format: Literal['auto', 'markdown', 'csv', 'terminal'] = 'auto',
    out: Path | None = None,
) -> None:
    """Show results as a table: mean ± standard deviation over seeds, the best of a row marked.

    Args:
      results: folders of results, as `jaxpruner compare` and `jaxpruner run` leave them.
      format: how to write it; auto: as the ending of --out says (.md, .csv), without --out for the terminal.
      out: a file to write instead of the terminal.
    """
    chosen = format
    if chosen == 'auto':
        chosen = 'terminal' if out is None else _ENDINGS.get(out.suffix)
    if chosen is None or (out is not None and chosen == 'terminal'):
        raise ValueError(f'--out {out}: end it in .md or .csv, or say --format markdown or csv')
    cells = _read(results)
    if chosen == 'terminal':
        text = report.to_text(cells, shutil.get_terminal_size().columns) + '\n'
    else:
        text = report.to_markdown(cells) if chosen == 'markdown' else report.to_csv(cells)
    if out is None:
        print(text, end='')
    else:
        atomic_files.replace_file(out, lambda temporary: temporary.write_text(text))
        print(out)


def plot(
    results: Folders = (),
    *,
    kind: Literal['sparsity', 'layers', 'masks'] = 'sparsity',
    cell: str | None = None,
    out: Path | None = None,
) -> None:
    """Draw results: the metric against the sparsity, the sparsity of each layer, or masks while they change.

    Args:
      results: folders of results, as `jaxpruner compare` and `jaxpruner run` leave them.
      kind: sparsity: the metric against it; layers: the sparsity of each; masks: those of one cell, as an animation.
      cell: whose masks: algorithm, sparsity and seed, as in magnitude_0.8_0.
      out: the image: .png, .pdf or .svg, for masks .gif. Without it, a file named for the kind in the first folder.
    """
    if not results or (kind == 'masks') != (cell is not None) or (cell and results[1:]):
        raise ValueError(
            'name at least one folder of results; for --kind masks exactly one, and with --cell one of its cells, such '
            'as magnitude_0.8_0'
        )
    ending = 'png' if cell is None else 'gif'
    first = next(iter(results))
    path = out or first / f'{"_".join(filter(None, (kind, cell)))}.{ending}'
    if cell is not None:
        report.animate_masks(first, cell, path)
    elif kind == 'sparsity':
        report.plot_metric_against_sparsity(_read(results), path)
    else:
        report.plot_layer_sparsity(_read(results), path)
    print(path)


def _read(folders: tuple[Path, ...]) -> list[report.Cell]:
    if not folders:
        raise ValueError('name at least one folder of results')
    return [cell for folder in folders for cell in report.read_cells(folder)]
