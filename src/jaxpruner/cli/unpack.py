"""`jaxpruner unpack PACKED --out …`: a packed file as the checkpoint of which it was made."""

import dataclasses
from pathlib import Path

from jaxpruner.cli import arguments
from jaxpruner.files import input_files


@dataclasses.dataclass(frozen=True)
class Unpack:
    """Write a packed file as an ordinary safetensors file, bit by bit what was packed.

    PACKED is a file that `jaxpruner pack` or jaxpruner.sparse.save wrote. It is read tensor by tensor and never held in
    memory. Names, dtypes, shapes and metadata are those of the checkpoint that was packed.

    Example:
      jaxpruner unpack packed.safetensors --out dense.safetensors
    """

    packed: arguments.PackedPath
    """The packed file."""
    out: Path
    """The .safetensors file to write."""
    overwrite: bool = False
    """Replace a file that is there."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Unpacks and says what the tensors take."""
        input_files.check_exists(self.packed)
        from jaxpruner import checkpoints, sparse  # loads JAX, for which a wrong path need not wait
        from jaxpruner.cli import checkpoint_tables, packing_tables

        packed = sparse.open_packed(self.packed)
        with (
            checkpoint_tables.leaf_progress(packed.leaves, self.progress) as on_leaf,
            checkpoints.SafetensorsWriter(
                self.out, packed.leaves, packed.metadata, overwrite=self.overwrite
            ) as writer,
        ):
            for name, leaf in packed.leaves.items():
                on_leaf(name, leaf)
                writer.write(name, packed.read(name))
        print(f'{self.out}: {packing_tables.packing_words(packed)}')
