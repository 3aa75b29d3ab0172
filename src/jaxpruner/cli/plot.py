"""`jaxpruner plot`: results of runs as images."""

import dataclasses
from pathlib import Path
from typing import Literal

from jaxpruner.cli import arguments
from jaxpruner.cli.table import read_folders
from jaxpruner.report import animation, plots


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draws results: the metric against the sparsity, the sparsity of each layer, or the masks while they change.

    Examples:
      jaxpruner plot out/resnet
      jaxpruner plot out/resnet --kind masks --cell magnitude_0.8_0 --out masks.gif
    """

    results: arguments.Folders = ()
    """Folders of results, as `jaxpruner compare` and `jaxpruner run` leave them."""
    kind: Literal['sparsity', 'layers', 'masks'] = 'sparsity'
    """sparsity: the metric against it; layers: the sparsity of each; masks: those of one cell, as an animation."""
    cell: arguments.OptionalName = None
    """Whose masks: algorithm, sparsity and seed, as in magnitude_0.8_0. Not needed where only one was kept."""
    out: arguments.OptionalPath = None
    """The image: .png, .pdf or .svg, for masks .gif. Without it, a file named for the kind in the first folder."""

    @property
    def path(self) -> Path:
        """The file that is written."""
        if self.out is not None:
            return self.out
        if not self.results:
            raise ValueError('name at least one folder of results')
        name = f'masks_{self.masked_cell}.gif' if self.kind == 'masks' else f'{self.kind}.png'
        return self.results[0] / name

    @property
    def masked_cell(self) -> str:
        """The cell whose masks are drawn: the one that is named, or the only one."""
        if len(self.results) != 1:
            raise ValueError(f'--kind masks draws one folder of results, got {len(self.results)}')
        if self.cell is not None:
            return self.cell
        folder = self.results[0]
        names = animation.mask_names(folder)
        if not names:
            raise FileNotFoundError(
                f'no masks in {folder}: looked for {folder / "masks" / "*.npz"}'
            )
        if len(names) > 1:
            raise ValueError(f'say which masks to draw with --cell: {", ".join(names)}')
        return names[0]

    def run(self) -> None:
        """Writes the image and prints its path."""
        if self.cell is not None and self.kind != 'masks':
            raise ValueError(
                f'--cell {self.cell} is for --kind masks; --kind {self.kind} draws all cells'
            )
        path = self.path
        match self.kind:
            case 'masks':
                animation.animate_masks(self.results[0], self.masked_cell, path)
            case 'sparsity':
                plots.plot_metric_against_sparsity(read_folders(self.results), path)
            case 'layers':
                plots.plot_layer_sparsity(read_folders(self.results), path)
        print(path)
