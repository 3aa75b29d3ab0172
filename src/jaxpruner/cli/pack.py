"""`jaxpruner pack CHECKPOINT --out …`: a checkpoint without its zeros, as one file."""

import dataclasses
from pathlib import Path

from jaxpruner.cli import arguments
from jaxpruner.files import input_files


@dataclasses.dataclass(frozen=True)
class Pack:
    """Write a checkpoint as one safetensors file in which each tensor has its smallest format.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder that orbax
    wrote. The formats are dense, N:M values and indices, blocks and indices, CSR, and one bit a weight; `jaxpruner
    inspect` says what each tensor takes in them. `jaxpruner unpack` writes the tensors as they were, bit by bit, and
    jaxpruner.sparse.load reads them in Python.

    All but the bit pattern of +0 is kept. With --masks, what `jaxpruner prune --masks-out` wrote decides, so that
    weights of a mask that are zero are kept, too.

    Examples:
      jaxpruner pack sparse.safetensors --out packed.safetensors
      jaxpruner pack checkpoints/1000 --masks m.safetensors --out p.safetensors
    """

    checkpoint: arguments.CheckpointPath
    """File or folder."""
    out: Path
    """The file to write."""
    masks: arguments.OptionalPath = None
    """A checkpoint of masks under the names of tensors, not 0 where a weight is kept."""
    overwrite: bool = False
    """Replace a file that is there."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Packs and says what the tensors take."""
        for path in (self.checkpoint, self.masks):
            if path is not None:
                input_files.check_exists(path)
        from jaxpruner import checkpoints, sparse  # loads JAX, for which a wrong path need not wait
        from jaxpruner.cli import packing_tables
        from jaxpruner.sparse.storage.manifest import MANIFEST_KEY

        checkpoint = checkpoints.open_checkpoint(self.checkpoint)
        if MANIFEST_KEY in checkpoint.metadata:
            raise ValueError(
                f'{checkpoint.path} is packed already; name another checkpoint, or unpack it first'
            )
        masks = None if self.masks is None else checkpoints.open_checkpoint(self.masks)
        sparse.save(
            self.out,
            checkpoint,
            masks=masks,
            metadata=checkpoint.metadata,
            overwrite=self.overwrite,
            progress=self.progress,
        )
        packed = sparse.open_packed(self.out)
        print(f'{self.out}: {packing_tables.packing_words(packed)}')
        print(packing_tables.packed_table(packed))
