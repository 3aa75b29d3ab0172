"""Checkpoints on disk: what is in them, and pruning them tensor by tensor.

Reads safetensors (also sharded) and orbax, writes safetensors. Needs the extra `jaxpruner[checkpoint]`.
"""

from jaxpruner.checkpoints.choosing import Choice as Choice
from jaxpruner.checkpoints.choosing import choose as choose
from jaxpruner.checkpoints.inspection import LeafReport as LeafReport
from jaxpruner.checkpoints.inspection import inspect_leaves as inspect_leaves
from jaxpruner.checkpoints.pruning import prune as prune
from jaxpruner.checkpoints.reading import Checkpoint as Checkpoint
from jaxpruner.checkpoints.reading import Leaf as Leaf
from jaxpruner.checkpoints.reading import open_checkpoint as open_checkpoint
from jaxpruner.checkpoints.writing import write_safetensors as write_safetensors
