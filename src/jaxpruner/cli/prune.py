"""`jaxpruner prune CHECKPOINT --sparsity … --out …`: prunes a checkpoint once, without training."""

import dataclasses
from pathlib import Path
from typing import Literal

from jaxpruner.cli import arguments, own_modules
from jaxpruner.files import input_files


@dataclasses.dataclass(frozen=True)
class Prune:
    """Write a checkpoint in which the weights of least magnitude are zero.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json (OUT is then a folder of
    shards), or a folder that orbax wrote. It is read in parts and never held in memory; dtypes, metadata and all other
    tensors stay as they are, byte for byte. OUT appears when it is whole, and no two processes write it at once.

    By default all tensors of floating point with more than one dimension are pruned, but for an optimizer's state, and
    for what looks like an embedding or an output head (embed_tokens, wte, lm_head and such), unless a name in --types
    or --only matches it; the table says what was left out and why. A name may be a glob, in which `*` stands for
    anything; one that matches nothing is an error. A type is unstructured, 2:4, nm_2,4,0 (along axis 0), block_4,4,
    channel_-1 or dense.

    Sparse hardware wants N:M along the inputs of a layer. 2:4 lies along the last axis: these are the inputs in
    checkpoints of PyTorch, whose weights are (outputs, inputs). Kernels of flax and Haiku are (inputs, outputs), also
    those of convolutions at their end: write nm_2,4,-2 for them.

    Examples:
      jaxpruner prune model.safetensors --sparsity 0.8 --out sparse.safetensors
      jaxpruner prune torch.safetensors --types '*mlp*=2:4' '*=dense' --out out
      jaxpruner prune flax/1000/ --types '*kernel=nm_2,4,-2' '*=dense' --out out
      jaxpruner prune shards/ --sparsity 0.5 --skip 'vision*' --out sparse/
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
    """Which weights stand together; the first name that matches counts, TYPE alone is for the others."""
    only: arguments.Names = ()
    """Names of the tensors to prune; a vector only by its full name."""
    skip: arguments.Names = ()
    """Names of tensors to leave as they are."""
    masks_out: arguments.OptionalPath = None
    """Also write the masks there, as uint8 safetensors, 1 where a weight is kept."""
    seed: int = 8
    """Of random scores."""
    modules: arguments.Modules = ()
    """Your own modules, imported first, such as mine for mine.py here; they may register sparsity types."""
    overwrite: bool = False
    """Replace a file that is there."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Prunes and says what has been removed."""
        input_files.check_exists(self.checkpoint)
        from jaxpruner import checkpoints  # loads JAX, for which a wrong path need not wait
        from jaxpruner.cli import checkpoint_tables
        from jaxpruner.sparse.storage.checkpoint_sizes import open_packed_or_dense

        own_modules.import_modules(self.modules)
        checkpoint = open_packed_or_dense(self.checkpoint)
        leaves = checkpoint.leaves
        types = [_parse_type(text) for text in self.types]
        choices = checkpoints.choose(
            leaves, self.sparsity, self.distribution, types, self.only, self.skip
        )
        with checkpoint_tables.leaf_progress(leaves, self.progress) as on_leaf:
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
        total = sum(leaf.size for leaf in leaves.values())
        print(
            f'{self.out}: {len(kept)} of {len(leaves)} tensors pruned, {removed:,} of their {size:,} '
            f'weights removed ({removed / max(size, 1):.2%}; {removed / max(total, 1):.2%} of all {total:,})'
        )
        reasons = checkpoints.left_out(leaves, types, self.only, self.skip)
        print(checkpoint_tables.pruning_table(leaves, choices, reasons))
        others = dict(types).get(None, 'unstructured')
        print(checkpoint_tables.tables_and_heads(reasons, f"--types '*={others}'"), end='')


def _parse_type(text: str) -> tuple[str | None, str]:
    """Splits NAME=TYPE, or TYPE for all that is not named, and refuses what is no type."""
    from jaxpruner.sparsity_types import parse_sparsity_type

    name, separator, type_text = text.rpartition('=')
    type_text = type_text.strip()
    if separator and not name:
        raise ValueError(
            f'types: {text!r} has no name before =; write NAME=TYPE, such as *mlp*=2:4, or TYPE alone'
        )
    if type_text != 'dense':
        try:
            parse_sparsity_type(type_text)
        except ValueError as error:
            raise ValueError(f'types: {text!r}: {error}') from None
    return name or None, type_text
