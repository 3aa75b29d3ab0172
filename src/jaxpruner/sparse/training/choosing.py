"""Which leaves are trained in blocks, in which blocks, and why the other leaves stay dense."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner import sparsity_distributions
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training.layouts import Layout, NoLayoutError, has_surplus, layout_for
from jaxpruner.sparse.training.only_setting import Names, OnlySetting, first_reasons


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """What was asked for.

    Attributes:
      sparsity: the sparsity of all leaves, or by name; the first name that matches a leaf counts.
      block: inputs and outputs of a block; for all leaves, or by name.
      only: the leaves that are meant; `None` for all of them.
      low_rank: the rank of the term beside the blocks; for all leaves, or by name.

    Raises:
      ValueError: a sparsity outside [0, 1), a side of a block below 1, or a rank below 0.
      TypeError: one of these is no number.
    """

    sparsity: float | Mapping[Any, float | None]
    block: BlockShape | Mapping[Any, BlockShape]
    only: Names | None
    low_rank: int | Mapping[Any, int]

    def __post_init__(self):
        for name, sparsity in by_name(self.sparsity, 'sparsity').items():
            if sparsity is not None:
                _check_sparsity(sparsity, name)
        for name, block in by_name(self.block, 'block').items():
            _check_block(block, name)
        for name, rank in by_name(self.low_rank, 'low_rank').items():
            _check_rank(rank, name)

    def by_path(self, paths: Sequence[tree_lib.Path]) -> dict[tree_lib.Path, 'LeafSettings']:
        """What was asked for each leaf."""
        sparsity_of = lookup(self.sparsity, paths, 'sparsity')
        block_of = lookup(self.block, paths, 'block')
        rank_of = lookup(self.low_rank, paths, 'low_rank')
        settings = {}
        for path in paths:
            rank = rank_of(path) or 0
            settings[path] = LeafSettings(sparsity_of(path), block_of(path), rank)
        return settings


@dataclasses.dataclass(frozen=True)
class LeafSettings:
    """What was asked for one leaf; `None` if no name matches it."""

    sparsity: float | None
    block: BlockShape | None
    low_rank: int


def by_name(setting: Any, name: str) -> dict[str, Any]:
    """The values of a setting, under the names that messages give them."""
    if not isinstance(setting, Mapping):
        return {name: setting}
    return {f'{name}[{key!r}]': value for key, value in setting.items()}


def _check_sparsity(sparsity: Any, name: str) -> None:
    sparsity_distributions.check_sparsity(sparsity, name)
    if sparsity == 1:
        raise ValueError(
            f'{name} must be below 1, since each group of outputs keeps a block, got 1'
        )


def _check_block(block: Any, name: str) -> None:
    is_pair = isinstance(block, tuple | list) and len(block) == 2
    if not is_pair or not all(map(_is_whole_number, block)):
        raise TypeError(f'{name} must be inputs and outputs, such as (8, 128), got {block!r}')
    if min(block) < 1:
        raise ValueError(f'{name} must have at least one input and one output, got {tuple(block)}')


def _check_rank(rank: Any, name: str) -> None:
    if not _is_whole_number(rank):
        raise TypeError(f'{name} must be a whole number, got {rank!r}')
    if rank < 0:
        raise ValueError(f'{name} must not be negative, got {rank}; 0 means none')


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What becomes of the leaves of a model, by name.

    Attributes:
      layouts: the layouts of leaves that are trained in blocks.
      reasons: why the other leaves stay dense.
      surplus: those of `layouts` that keep many more weights than were asked for.
    """

    layouts: dict[str, Layout]
    reasons: dict[str, str]
    surplus: tuple[str, ...]


def choose_layouts(products: Products, settings: BlockSettings) -> Choice:
    """Decides for each leaf of a model whether it is trained in blocks, and in which.

    Args:
      products: the products of the model.
      settings: what was asked for.

    Raises:
      ValueError: a name means no leaf, or one that cannot be trained in blocks; or no leaf is left.
    """
    only = OnlySetting.of(settings.only, products)
    paths = [matrix_leaf.path for matrix_leaf in products.by_leaf.values()]
    settings_of = settings.by_path(paths)
    reasons = dict(products.refused)
    layouts = {}
    surplus = []
    for name, matrix_leaf in products.by_leaf.items():
        leaf_settings = settings_of[matrix_leaf.path]
        try:
            layout = _layout(matrix_leaf, only, leaf_settings)
        except NoLayoutError as error:
            if only.names_in_full(matrix_leaf.path):
                raise ValueError(f'only: {name!r} cannot be trained in blocks: {error}') from error
            reasons[name] = str(error)
            continue
        layouts[name] = layout
        sparsity = leaf_settings.sparsity
        if sparsity is not None and has_surplus(layout, sparsity):
            surplus.append(name)
    if not layouts:
        why = first_reasons(reasons)
        raise ValueError(f'no leaf of the model can be trained in blocks. {why}')
    return Choice(layouts, reasons, tuple(surplus))


def lookup(
    setting: Any, paths: Sequence[tree_lib.Path], name: str
) -> Callable[[tree_lib.Path], Any]:
    """A function from the path of a leaf to its value in a setting; `None` if no name of the setting matches it."""
    if not isinstance(setting, Mapping):
        return lambda path: setting
    matches = tree_lib.first_matches(setting, paths, name)
    values = list(setting.values())
    by_path = {}
    for path, number in zip(paths, matches, strict=True):
        by_path[path] = None if number is None else values[number]
    return by_path.__getitem__


def _layout(matrix_leaf: MatrixLeaf, only: OnlySetting, settings: LeafSettings) -> Layout:
    """The layout of a leaf.

    Raises:
      NoLayoutError: the leaf stays dense; the message says why.
    """
    sparsity = only.checked_sparsity(matrix_leaf, settings.sparsity)
    if settings.block is None:
        raise NoLayoutError('no name in block matches it')
    only.check_convolution(matrix_leaf)
    height, width = settings.block
    block = height, width
    shape = matrix_leaf.inputs, matrix_leaf.outputs
    return layout_for(matrix_leaf.layers, shape, block, sparsity, settings.low_rank)
