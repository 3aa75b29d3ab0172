"""`jaxpruner table` and `jaxpruner plot`: results of runs."""

import shutil
from pathlib import Path
from typing import Literal

from jaxpruner import report
from jaxpruner.cli.options import Folders
from jaxpruner.files import atomic_files


def table(results: Folders = (), *, out: Path | None = None) -> None:
    """Show results as a table: mean ± standard deviation over seeds, the best of a row marked.

    Args:
      results: folders of results, as `jaxpruner compare` and `jaxpruner run` leave them.
      out: a Markdown file to write instead, .md.
    """
    if out is None:
        print(report.to_text(_read(results), shutil.get_terminal_size().columns))
        return
    if out.suffix != '.md':
        raise ValueError(f'--out {out}: end it in .md')
    text = report.to_markdown(_read(results))
    atomic_files.replace_file(out, lambda temporary: temporary.write_text(text))
    print(out)


def plot(
    results: Folders = (),
    *,
    kind: Literal['sparsity', 'layers'] = 'sparsity',
    cell: str | None = None,
    out: Path | None = None,
) -> None:
    """Draw results: the metric against the sparsity, the sparsity of each layer, or masks while they change.

    Args:
      results: folders of results, as `jaxpruner compare` and `jaxpruner run` leave them.
      kind: sparsity: the metric against it; layers: the sparsity of each.
      cell: draw the masks of this one, as an animation: algorithm, sparsity and seed, as in magnitude_0.8_0.
      out: the image: .png, .pdf or .svg, for --cell .gif; by default a file in the first folder.
    """
    if cell is not None and len(results) != 1:
        raise ValueError('--cell: name exactly one folder of results, the one with this cell')
    name = f'{kind}.png' if cell is None else f'masks_{cell}.gif'
    path = out or Path(*results[:1], name)
    if cell is not None:
        report.animate_masks(results[0], cell, path)
    elif kind == 'sparsity':
        report.plot_metric_against_sparsity(_read(results), path)
    else:
        report.plot_layer_sparsity(_read(results), path)
    print(path)


def _read(folders: tuple[Path, ...]) -> list[report.Cell]:
    if not folders:
        raise ValueError('name at least one folder of results')
    return [cell for folder in folders for cell in report.read_cells(folder)]
