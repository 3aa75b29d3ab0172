"""Cuts trees: the parameters, the state of the model, trees of their structure, and optimizer states.

An array belongs to the parameter whose path ends the array's own path, as in `mu/dense/kernel`. It is cut like the
parameter if it has the parameter's shape, or if it is the parameter's mask, packed or not.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import atoms, sizes_of
from jaxpruner.structure.cut import Cut
from jaxpruner.structure.programs import Trace
from jaxpruner.tree import Path, PyTree

Shape = tuple[int, ...]
_SIZES = 'sizes'  # of a `SparseState`, also of one that NNX took apart


def cut_tree(tree: PyTree, traces: Sequence[Trace], cut: Cut, to_zero: bool = False) -> PyTree:
    """The tree without removed channels; or with zeros there, in the same shapes.

    Raises:
      ValueError: an array has neither the shape of its parameter nor that of the parameter's mask; or it has the path
        of no parameter, but the shape of one that is cut.
    """
    change = cut.zero if to_zero else cut.take
    axes_of = dict(traces[0].leaves)
    size_of_model = sum(math.prod(sizes_of(axes)) for axes in axes_of.values())
    cut_atoms = cut.owners.union(cut.lists)
    free_axes: dict[Path, list[int]] = {}  # of a state; their sizes do not matter to the cut
    for trace in traces:
        for path, axes in trace.states.items():
            axes_of.setdefault(path, axes)
            free_axes[path] = [i for i, a in enumerate(axes) if cut_atoms.isdisjoint(atoms(a))]

    def fits(shape: Shape, path: Path) -> bool:
        """Whether an array has the shape of a leaf of the model."""
        own = list(sizes_of(axes_of[path]))
        for i in free_axes.get(path, ()) if len(shape) == len(own) else ():
            own[i] = shape[i]
        return tuple(own) == shape

    def map_leaf(path: Path, value: Any) -> Any:
        shape, name = jnp.shape(value), tree_lib.path_string(path)
        owners = [path[start:] for start in range(len(path)) if path[start:] in axes_of]
        if list(axes_of) == [tree_lib.SINGLE_ARRAY_PATH]:  # one bare array has no name of its own
            owners.append(tree_lib.SINGLE_ARRAY_PATH)
        if not owners:
            is_cut = [each for each, axes in axes_of.items() if cut.shrinks(axes)]
            is_flat_model = shape and math.prod(shape) >= size_of_model
            if is_flat_model or any(fits(shape, each) for each in is_cut):
                raise ValueError(
                    f'{name}, of shape {shape}, has the path of no parameter, so it is unknown where to cut it; leave '
                    'it out of the tree, or give an optimizer state whose moments have the structure of the parameters'
                )
            return value
        owner = owners[0]
        axes = axes_of[owner]
        whole = sizes_of(axes)
        parents = path[: -len(owner)] if path[-len(owner) :] == owner else path
        if not shape and _SIZES in parents:
            return jnp.uint32(math.prod(whole if to_zero else cut.shape(axes)))
        if fits(shape, owner):
            return change(value, axes)
        # Nothing is cut, or it is a number of the leaf.
        if not cut.shrinks(axes) or math.prod(shape) <= 1:
            return value
        if is_packed(value, whole):
            mask = change(sparse_state_lib.unpack_like(value, whole), axes)
            is_flat = len(shape) != len(whole)
            return jnp.packbits(mask) if is_flat else sparse_state_lib.pack(mask)
        raise ValueError(
            f'{name} has shape {shape}, but its parameter has {whole}, so it is unknown where to cut it (factored '
            'moments and histories of parameters cannot be cut); start the optimizer anew with init'
        )

    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    return treedef.unflatten(map(map_leaf, paths, leaves))


def is_packed(value: Any, shape: Shape) -> bool:
    """Whether an array is the packed mask of a parameter of this shape."""
    if value.dtype != jnp.uint8:
        return False
    is_flat = value.shape == sparse_state_lib.packed_shape((math.prod(shape),))
    return is_flat or sparse_state_lib.axis_of_bits(value.shape, shape) is not None
