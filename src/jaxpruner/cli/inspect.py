"""`jaxpruner inspect CHECKPOINT`: what is in a checkpoint."""

import dataclasses
import json

from jaxpruner.cli import arguments
from jaxpruner.core import input_files


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show sparsity, structure and bytes of each tensor in a checkpoint.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder that orbax
    wrote. Structure is N:M (of each M weights along an axis at most N are not zero), blocks over the last two axes, and
    channels that are zero throughout. Packed means a mask of one bit a weight and the weights that are not zero, or all
    weights where that is less.

    Examples:
      jaxpruner inspect model.safetensors
      jaxpruner inspect checkpoints/1000 --json > report.json
    """

    checkpoint: arguments.CheckpointPath
    """File or folder."""
    json: bool = False
    """Print JSON instead of a table."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Reads the checkpoint and prints what is in it."""
        input_files.check_exists(self.checkpoint)
        from jaxpruner import checkpoints  # loads JAX, for which a wrong path need not wait
        from jaxpruner.checkpoints.inspection import totals
        from jaxpruner.cli import checkpoint_tables

        checkpoint = checkpoints.open_checkpoint(self.checkpoint)
        with checkpoint_tables.leaf_progress(checkpoint.leaves, self.progress) as on_leaf:
            reports = list(checkpoints.inspect_leaves(checkpoint, on_leaf))
        if not self.json:
            print(checkpoint_tables.inspection_table(reports))
            return
        content = {
            'leaves': [report.as_dict() for report in reports],
            'total': totals(reports),
            'metadata': dict(checkpoint.metadata),
        }
        print(json.dumps(content, indent=2))
