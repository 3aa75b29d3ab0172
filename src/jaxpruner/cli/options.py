"""The options that `jaxpruner run` and `jaxpruner compare` share."""

import dataclasses
from typing import Literal

from jaxpruner.cli import arguments

Over = Literal['auto', 'each', 'map', 'vmap', 'devices']  # as `cell_mapping.RequestedMapping`


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """What to train, with which data and settings, and where the results go."""

    workload: arguments.WorkloadName
    """resnet, vit, lenet, federated, t5 or dqn; or with data before it, as in digits-resnet or mnist-vit."""
    preset: arguments.OptionalName = None
    """Such as default (small, needs no files), data (the default with --data-dir) or full (the original's size)."""
    data_dir: arguments.OptionalPath = None
    """Folder with the data that the recipe names, such as mnist.npz."""
    recipe: arguments.OptionalPath = None
    """A TOML file with a whole recipe, or with what differs from the preset."""
    set: arguments.Settings = ()
    """Single values of the recipe, such as steps=500 optimizer.learning_rate=0.05."""
    out: arguments.OptionalPath = None
    """Folder for the results; without it out/WORKLOAD."""
    modules: arguments.Modules = ()
    """Your own modules, imported first, such as mine for mine.py here; they may register algorithms and
    sparsity types."""
    print_recipe: bool = False
    """Print the recipe as TOML and train nothing."""
    over: Over | None = None
    """How the cells of an algorithm are trained: each (one after another), map (so, but in one program), vmap
    (together), devices (a share on each device); auto measures which is the fastest. Without it, as the folder was
    begun, or else as is known to be fast on this kind of device."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    plots: bool = False
    """Also draw sparsity.png and layers.png into the folder; `jaxpruner plot` draws more."""
    progress: bool = True
    """Show a progress bar; without a terminal there is none."""
    compilation_cache: bool = True
    """Keep compiled programs in your cache folder, at most 1 GiB; JAX_COMPILATION_CACHE_DIR names another folder."""
