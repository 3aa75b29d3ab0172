"""`prune` in a process of its own, for tests that kill it: what is imported here is imported once, then forked."""

import os
import pathlib

import numpy as np

from jaxpruner.checkpoints import choose, open_checkpoint, prune, write_safetensors
from jaxpruner.checkpoints.reading import INDEX_NAME

TENSORS = 8


def write_dense(folder):
    """A folder of two shards."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    names = [f'layer{number}' for number in range(TENSORS)]
    file_of = {name: f'shard{number % 2}.safetensors' for number, name in enumerate(names)}
    for file in sorted(set(file_of.values())):
        write_safetensors(
            folder / file,
            {
                name: draw.standard_normal((256, 512), np.float32)
                for name in names
                if file_of[name] == file
            },
        )
    pairs = ', '.join(f'"{name}": "{file}"' for name, file in file_of.items())
    (folder / INDEX_NAME).write_text(f'{{"weight_map": {{{pairs}}}}}')


def run(dense, out, sparsity, log):
    """Prunes, and adds a line to a file before each tensor; refused is refused."""

    checkpoint = open_checkpoint(dense)
    read = checkpoint.read

    def logged(name):
        with pathlib.Path(log).open('a') as file:
            file.write(f'{name}\n')
        return read(name)

    checkpoint.read = logged
    try:
        prune(checkpoint, pathlib.Path(out), choose(checkpoint.leaves, sparsity), overwrite=True)
    except (BlockingIOError, FileExistsError):
        os._exit(3)
    os._exit(0)  # what JAX's threads would do at the end of a fork is of no interest
