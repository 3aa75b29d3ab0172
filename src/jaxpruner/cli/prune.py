"""`jaxpruner prune CHECKPOINT --sparsity … --out …`: prunes a checkpoint once, without training."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxpruner.cli import arguments, output
from jaxpruner.cli.progress import leaf_progress
from jaxpruner.core import text_tables

if TYPE_CHECKING:
    from jaxpruner.checkpoints import Choice, Leaf
    from jaxpruner.sparsity_types import SparsityType


@dataclasses.dataclass(frozen=True)
class Prune:
    """Write a checkpoint in which the weights of least magnitude are zero.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json (OUT is then a folder of
    shards), or a folder that orbax wrote. It is read in parts and never held in memory; dtypes, metadata and all other
    tensors stay as they are, byte for byte. OUT appears when it is whole, and no two processes write it at once.

    By default all tensors of floating point with more than one dimension are pruned, but for an optimizer's state; the
    table says what was left out and why. A name may be a glob, in which `*` stands for anything; one that matches
    nothing is an error. A type is unstructured, 2:4, nm_2,4,0 (along axis 0), block_4,4, channel_-1 or dense.

    Sparse hardware wants N:M along the inputs of a layer. 2:4 lies along the last axis: these are the inputs in
    checkpoints of PyTorch, whose weights are (outputs, inputs). Kernels of flax and Haiku are (inputs, outputs), also
    those of convolutions at their end: write nm_2,4,-2 for them.

    Examples:
      jaxpruner prune model.safetensors --sparsity 0.8 --out sparse.safetensors
      jaxpruner prune torch.safetensors --types '*mlp*=2:4' '*=dense' --out out
      jaxpruner prune flax/1000/ --types '*kernel=nm_2,4,-2' '*=dense' --out out
      jaxpruner prune shards/ --sparsity 0.5 --skip '*embed*' --out sparse/

    >>> Prune(Path('model.safetensors'), Path('sparse.safetensors'), sparsity=0.8).scores
    'magnitude'
    """

    checkpoint: arguments.CheckpointPath
    """File or folder."""
    out: Path
    """What to write: a .safetensors file, or a folder for shards."""
    sparsity: arguments.OptionalShare = None
    """Share of weights to remove, in [0, 1]; N:M types do without."""
    scores: Literal['magnitude', 'random'] = 'magnitude'
    """What ranks the weights of a tensor."""
    distribution: Literal['uniform', 'erk'] = 'uniform'
    """How the sparsity is shared among tensors: the same for each, or small ones denser."""
    types: arguments.Types = ()
    """Which weights stand together; the first name that matches counts, TYPE alone is for all."""
    only: arguments.Names = ()
    """Names of the tensors to prune; a vector only by its full name."""
    skip: arguments.Names = ()
    """Names of tensors to leave as they are."""
    masks_out: arguments.OptionalPath = None
    """Also write the masks there, as uint8 safetensors, 1 where a weight is kept."""
    seed: int = 8
    """Of random scores."""
    overwrite: bool = False
    """Replace a file that is there."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Prunes and says what has been removed."""
        from jaxpruner import checkpoints

        checkpoint = checkpoints.open_checkpoint(self.checkpoint)
        rules = [_rule(text) for text in self.types]
        choices = checkpoints.choose(
            checkpoint.leaves, self.sparsity, self.distribution, rules, self.only, self.skip
        )
        with leaf_progress(checkpoint.leaves, self.progress) as on_leaf:
            kept = checkpoints.prune(
                checkpoint,
                self.out,
                choices,
                scores=self.scores,
                seed=self.seed,
                masks_out=self.masks_out,
                overwrite=self.overwrite,
                on_leaf=on_leaf,
            )
        size = sum(leaf.size for leaf in kept)
        removed = size - sum(leaf.kept for leaf in kept)
        total = sum(leaf.size for leaf in checkpoint.leaves.values())
        print(
            f'{self.out}: {len(kept)} of {len(checkpoint.leaves)} tensors pruned, {removed:,} of their {size:,} '
            f'weights removed ({removed / max(size, 1):.2%}; {removed / max(total, 1):.2%} of all {total:,})'
        )
        reasons = checkpoints.left_out(checkpoint.leaves, rules, self.only, self.skip)
        print(_table(checkpoint.leaves, choices, reasons))


_COLUMNS = (
    text_tables.Column('tensors', align='right'),
    text_tables.Column('weights', align='right'),
    text_tables.Column('what happened', overflow='wrap'),
    text_tables.Column('first of them', overflow='fold'),
)


def _table(
    leaves: 'Mapping[str, Leaf]', choices: 'Mapping[str, Choice]', reasons: Mapping[str, str]
) -> str:
    """A row for each thing that happened to tensors: the type that they were pruned to, or why they were left out."""
    groups: dict[str, list[str]] = {}
    for name in leaves:
        happened = (
            _pruned_words(name, choices[name].kind) if name in choices else f'left: {reasons[name]}'
        )
        groups.setdefault(happened, []).append(name)
    rows = []
    for happened, names in groups.items():
        weights = sum(leaves[name].size for name in names)
        rows.append([str(len(names)), f'{weights:,}', happened, output.printable(names[0])])
    rows.sort(key=lambda row: row[2].startswith('left'))
    return text_tables.to_text(_COLUMNS, rows, width=output.width())


def _pruned_words(name: str, kind: 'SparsityType') -> str:
    from jaxpruner.checkpoints.plan import type_words
    from jaxpruner.sparsity_types import NByM

    words = f'pruned: {type_words(kind)}'
    is_of_flax = name.removesuffix('/value').endswith('kernel')
    if is_of_flax and isinstance(kind, NByM) and kind.axis == -1:
        words += f', the outputs of kernels (inputs, outputs); nm_{kind.n},{kind.m},-2 lies along their inputs'
    return words


def _rule(text: str) -> tuple[str, str]:
    from jaxpruner.sparsity_types import parse_sparsity_type

    name, separator, kind = text.rpartition('=')
    if separator and not name:
        raise ValueError(
            f'types: {text!r} has no name before =; write NAME=TYPE, such as *mlp*=2:4, or TYPE alone'
        )
    if kind.strip() != 'dense':
        try:
            parse_sparsity_type(kind)
        except ValueError as error:
            raise ValueError(f'types: {text!r}: {error}') from None
    return name or '*', kind.strip()
