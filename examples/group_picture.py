"""Draws what a group of channels is: rows and columns of several arrays that can only be removed together.

python examples/group_picture.py  # draws docs/images/channel_groups.png
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.colors
import numpy as np
import tyro

import jaxpruner
from jaxpruner.report import figures

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    'first': {'kernel': (6, 12), 'bias': (12,)},
    'second': {'kernel': (12, 9), 'bias': (9,)},
    'third': {'kernel': (9, 4), 'bias': (4,)},
}
KEEP = {'first/kernel[1]': [0, 1, 3, 4, 6, 8, 9, 11], 'second/kernel[1]': [0, 2, 3, 5, 7, 8]}
COLORS = ('#173f5f', '#ddaa33', '#cc6677', '#bb5566')  # kept, removed with either group, with both


@dataclasses.dataclass(frozen=True)
class Settings:
    """Draws the groups of a small network."""

    image: Path = ROOT / 'docs' / 'images' / 'channel_groups.png'
    """The .png, .svg or .pdf to write."""


def apply(params: Any, x: jax.Array) -> jax.Array:
    """Three dense layers."""
    for name in SHAPES:
        x = x @ params[name]['kernel'] + params[name]['bias']
        if name != 'third':
            x = jax.nn.relu(x)
    return x


def removed_by() -> tuple[Any, Any]:
    """For each element, 0 if it stays, else the sum of the numbers of its groups; and the smaller arrays."""
    ones = jax.tree.map(jnp.ones, SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))
    graph = jaxpruner.channel_groups(apply, ones, jnp.ones((1, 6)))
    numbers = jax.tree.map(jnp.zeros_like, ones)
    for number, (name, indices) in enumerate(KEEP.items(), start=1):
        zeroed = graph.zeroed(ones, {name: indices})
        numbers = jax.tree.map(lambda old, kept, n=number: old + n * (1 - kept), numbers, zeroed)
    return numbers, graph.shrink(ones, KEEP, verify=False)


def draw(figure: Any) -> None:
    """Draws each array, kernels above biases."""
    numbers, small = removed_by()
    widths = [shapes['kernel'][1] for shapes in SHAPES.values()]
    heights = [max(shapes['kernel'][0] for shapes in SHAPES.values()), 1]
    panels = figure.subplots(2, len(SHAPES), width_ratios=widths, height_ratios=heights)
    colors = matplotlib.colors.ListedColormap(COLORS)
    for column, layer in enumerate(SHAPES):
        for row, leaf in enumerate(('kernel', 'bias')):
            axes = panels[row][column]
            values = np.atleast_2d(np.asarray(numbers[layer][leaf]))
            axes.pcolormesh(values[::-1], cmap=colors, vmin=0, vmax=3, edgecolors='white')
            axes.set_aspect('equal')
            axes.axis('off')
            shape = '×'.join(map(str, SHAPES[layer][leaf]))
            smaller = '×'.join(map(str, small[layer][leaf].shape))
            change = shape if shape == smaller else f'{shape} → {smaller}'
            axes.set_title(f'{layer}/{leaf}\n{change}', fontsize=10, color=figures.INK)


def main() -> None:
    """Draws and writes."""
    settings = tyro.cli(Settings)
    figures.check_ending(settings.image, figures.IMAGE_ENDINGS)
    figure = figures.new_figure(8, 4.6)
    draw(figure)
    first, second = KEEP
    title = f'Removed with channels of {first} (yellow), of {second} (red)'
    figure.suptitle(title, fontsize=12, color=figures.INK)
    figures.save(figure, settings.image)
    print(settings.image)


if __name__ == '__main__':
    main()
