"""Which leaves are trained in blocks, in which blocks, and why the others stay dense."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner import sparsity_distributions
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparse.operators.block_layout import BlockShape
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products
from jaxpruner.sparse.training.layouts import Layout, NoLayoutError, has_surplus, layout_for

MEASURE = 'measure'
Names = str | Sequence[str | tree_lib.Path]


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """What was asked for.

    Attributes:
      sparsity: the sparsity of each leaf, or by name; the first name that matches a leaf counts.
      block: inputs and outputs of a block, or `'measure'`; perhaps by name, too.
      only: the leaves that are meant, or all of them.
      low_rank: the rank of the term beside the blocks; perhaps by name, too.

    Raises:
      ValueError: a sparsity outside [0, 1), a block or a rank that is none.
      TypeError: these are no numbers.
    """

    sparsity: float | Mapping[Any, float | None]
    block: BlockShape | str | Mapping[Any, BlockShape | str]
    only: Names | None
    low_rank: int | Mapping[Any, int]

    def __post_init__(self):
        for name, sparsity in by_name(self.sparsity, 'sparsity').items():
            if sparsity is not None:
                sparsity_distributions.check_sparsity(sparsity, name)
                if sparsity == 1:
                    raise ValueError(
                        f'{name} must be below 1, since each group of outputs keeps a block, got 1'
                    )
        for name, block in by_name(self.block, 'block').items():
            _check_block(block, name)
        for name, rank in by_name(self.low_rank, 'low_rank').items():
            _check_rank(rank, name)

    @property
    def is_measured(self) -> bool:
        """Whether a block is to be measured."""
        return MEASURE in by_name(self.block, 'block').values()

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
    """What was asked for one leaf; `None` where no name matches it."""

    sparsity: float | None
    block: BlockShape | str | None
    low_rank: int


def by_name(setting: Any, name: str) -> dict[str, Any]:
    """The values of a setting by what messages call them."""
    if not isinstance(setting, Mapping):
        return {name: setting}
    return {f'{name}[{key!r}]': value for key, value in setting.items()}


def _check_block(block: Any, name: str) -> None:
    if block == MEASURE:
        return
    is_pair = isinstance(block, tuple | list) and len(block) == 2
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in block):
        raise TypeError(
            f"{name} must be inputs and outputs, such as (8, 128), or 'measure', got {block!r}"
        )
    if min(block) < 1:
        raise ValueError(f'{name} must have at least one input and one output, got {tuple(block)}')


def _check_rank(rank: Any, name: str) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f'{name} must be a whole number, got {rank!r}')
    if rank < 0:
        raise ValueError(f'{name} must not be negative, got {rank}; 0 means none')


@dataclasses.dataclass(frozen=True)
class Choice:
    """What becomes of the leaves of a model, by name.

    Attributes:
      layouts: the layouts of leaves that are trained in blocks.
      reasons: why the others stay dense.
      surplus: those of `layouts` that keep many more weights than were asked for.
    """

    layouts: dict[str, Layout]
    reasons: dict[str, str]
    surplus: tuple[str, ...]


def choose_layouts(
    products: Products,
    settings: BlockSettings,
    measured: Callable[[MatrixLeaf, float, int], Layout],
) -> Choice:
    """Decides for each leaf of a model.

    Args:
      products: the products of the model.
      settings: what was asked for.
      measured: the fastest layout for a leaf, a sparsity and a rank.

    Raises:
      ValueError: a name means no leaf, or one that cannot be trained in blocks; or no leaf is left.
    """
    reasons = dict(products.refused)
    paths = [matrix_leaf.path for matrix_leaf in products.by_leaf.values()]
    refused_paths = [tuple(name.split('/')) for name in reasons]
    only = None if settings.only is None else tree_lib.as_names(settings.only)
    tree_lib.check_names(only or (), paths + refused_paths, 'only')
    check_not_refused(only or (), paths, reasons)
    settings_of = settings.by_path(paths)
    layouts = {}
    for name, matrix_leaf in products.by_leaf.items():
        try:
            layouts[name] = _layout(matrix_leaf, only, settings_of[matrix_leaf.path], measured)
        except NoLayoutError as error:
            if is_named_in_full(only, matrix_leaf.path):
                raise ValueError(f'only: {name!r} cannot be trained in blocks: {error}') from error
            reasons[name] = str(error)
    if not layouts:
        why = '; '.join(f'{name}: {reason}' for name, reason in list(reasons.items())[:8])
        raise ValueError(f'no leaf of the model can be trained in blocks. {why}')
    surplus = []
    for name, layout in layouts.items():
        sparsity = settings_of[products.by_leaf[name].path].sparsity
        if sparsity is not None and has_surplus(layout, sparsity):
            surplus.append(name)
    return Choice(layouts, reasons, tuple(surplus))


def check_not_refused(
    names: Names, paths: Sequence[tree_lib.Path], reasons: Mapping[str, str]
) -> None:
    """Refuses names that mean no matrix.

    Raises:
      ValueError: a name means only leaves that are none.
    """
    for name in names:
        if any(tree_lib.matches(name, path) for path in paths):
            continue
        refused = [other for other in reasons if tree_lib.matches(name, tuple(other.split('/')))]
        raise ValueError(
            f'only: {name!r} cannot be trained on compact weights: {refused[0]}: {reasons[refused[0]]}'
        )


def lookup(
    setting: Any, paths: Sequence[tree_lib.Path], name: str
) -> Callable[[tree_lib.Path], Any]:
    """What a setting, perhaps one by name, says of a leaf; `None` where it says nothing."""
    if not isinstance(setting, Mapping):
        return lambda path: setting
    matches = tree_lib.first_matches(setting, paths, name)
    values = list(setting.values())
    by_path = {}
    for path, number in zip(paths, matches, strict=True):
        by_path[path] = None if number is None else values[number]
    return by_path.__getitem__


def is_named_in_full(only: Any, path: tree_lib.Path) -> bool:
    """Whether `only` has the name of this leaf itself, and no glob that matches it."""
    return only is not None and (path in only or tree_lib.path_string(path) in only)


def _layout(
    matrix_leaf: MatrixLeaf,
    only: Any,
    settings: LeafSettings,
    measured: Callable[[MatrixLeaf, float, int], Layout],
) -> Layout:
    """The layout of a leaf.

    Raises:
      NoLayoutError: it stays dense, and why.
    """
    path = matrix_leaf.path
    if only is not None and not tree_lib.matches_any(only, path):
        raise NoLayoutError('no name in only matches it')
    if not settings.sparsity:
        raise NoLayoutError('its sparsity is 0' if settings.sparsity == 0 else 'it has no sparsity')
    if settings.block is None:
        raise NoLayoutError('no name in block matches it')
    if matrix_leaf.op == 'conv' and not is_named_in_full(only, path):
        raise NoLayoutError(
            'it is a convolution, whose windows would be gathered into rows; name it in only, in full'
        )
    if isinstance(settings.block, str):
        return measured(matrix_leaf, settings.sparsity, settings.low_rank)
    height, width = settings.block
    shape = matrix_leaf.inputs, matrix_leaf.outputs
    return layout_for(
        matrix_leaf.layers, shape, (height, width), settings.sparsity, settings.low_rank
    )
