"""`jaxpruner inspect CHECKPOINT`: what is in a checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxpruner.cli import arguments, own_modules
from jaxpruner.files import input_files


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show sparsity, structure and bytes of each tensor in a checkpoint.

    CHECKPOINT is a .safetensors file, a folder with one or with a model.safetensors.index.json, or a folder that orbax
    wrote. Structure is N:M (of each M weights along an axis at most N are not zero), blocks over the last two axes, and
    channels that are zero throughout, with their indices. Packed means a mask of one bit a weight and the weights that
    are not zero, or all weights where that is less. The last table says what `jaxpruner pack` would write: the bytes of
    each tensor in each format, where they are less than dense. A packed file is shown as what it was made of.

    A file does not say which channels belong together. With --graph there is also a table of the hidden units, channels
    and heads of the model that can be removed without any change of its results.

    Examples:
      jaxpruner inspect model.safetensors
      jaxpruner inspect model.safetensors --graph mine:graph
      jaxpruner inspect checkpoints/1000 --json > report.json
    """

    checkpoint: arguments.CheckpointPath
    """File or folder."""
    graph: arguments.OptionalObject = None
    """A ChannelGraph of the model, or a function that returns one; such as mine:graph for graph in mine.py here."""
    json: bool = False
    """Print JSON instead of a table."""
    progress: bool = True
    """Show a progress bar if stderr is a terminal."""

    def run(self) -> None:
        """Reads the checkpoint and prints what is in it."""
        input_files.check_exists(self.checkpoint)
        from jaxpruner import checkpoints  # loads JAX, for which a wrong path need not wait
        from jaxpruner.checkpoints.inspection import totals
        from jaxpruner.cli import checkpoint_tables, packing_tables
        from jaxpruner.sparse.storage import checkpoint_sizes

        graph = self._graph()
        checkpoint = checkpoint_sizes.open_packed_or_dense(self.checkpoint)
        with checkpoint_tables.leaf_progress(checkpoint.leaves, self.progress) as on_leaf:
            reports = []
            sizes = []
            smallest = []
            for report in checkpoints.inspect_leaves(checkpoint, on_leaf):
                leaf_sizes, best = checkpoint_sizes.format_bytes(checkpoint, report.name)
                reports.append(report)
                sizes.append(leaf_sizes)
                smallest.append(best)
        zeros = {} if graph is None else self._zero_groups(checkpoint, graph)
        if self.json:
            leaves = []
            for report, leaf_sizes, best in zip(reports, sizes, smallest, strict=True):
                leaves.append({**report.as_dict(), 'formats': leaf_sizes, 'smallest': best})
            content = {
                'leaves': leaves,
                'total': totals(reports),
                'metadata': dict(checkpoint.metadata),
            }
            if graph is not None:
                content['zero_channels'] = {name: each.tolist() for name, each in zeros.items()}
            print(json.dumps(content, indent=2))
            return
        print(checkpoint_tables.inspection_table(reports))
        print(f'\n{packing_tables.sizes_table(reports, sizes, smallest)}')
        if graph is not None:
            sizes = {name: group.size for name, group in graph.groups.items()}
            print(f'\n{checkpoint_tables.zero_groups_table(sizes, zeros)}')

    def _zero_groups(self, checkpoint: Any, graph: Any) -> Mapping[str, Any]:
        from jaxpruner.checkpoints.zero_groups import zero_groups

        return zero_groups(checkpoint, graph)

    def _graph(self) -> Any:
        """Loads the graph that was named, before anything is read."""
        if self.graph is None:
            return None
        from jaxpruner.structure import ChannelGraph

        graph = own_modules.load_object(self.graph, 'graph')
        if not isinstance(graph, ChannelGraph):
            raise TypeError(
                f'graph: {self.graph} is no ChannelGraph, but {type(graph).__name__}; name what '
                'jaxpruner.channel_groups returned'
            )
        return graph
