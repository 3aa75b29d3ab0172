"""A model for packed parameters. These are plain arrays in dictionaries, and become operators inside of the program."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution import formats
from jaxpruner.sparse.execution.choosing import matrices_of
from jaxpruner.sparse.execution.report import ExecutionReport
from jaxpruner.sparse.program.models import Products
from jaxpruner.structure import ChannelGraph, channel_groups

Packed = dict[str, Any]


class Model(NamedTuple):
    """A model that can run: the whole one, or one without channels that are zero, since then all layers shrink.

    Attributes:
      apply_fn: the function of its parameters.
      products: its products.
      graph: of the channels of the whole model; `None` for the whole model.
      keep: the channels that stay.
    """

    apply_fn: Callable[..., Any]
    products: Products
    graph: ChannelGraph | None = None
    keep: Mapping[str, np.ndarray] = {}

    def without_zero_channels(
        self, params: tree_lib.PyTree, matrices: Mapping[str, np.ndarray], sample: tuple[Any, ...]
    ) -> 'Model':
        """The model without channels that are zero in these parameters; the same model if there are none."""
        used = []
        for name, matrix in matrices.items():
            used += formats.used_lines(self.products.by_leaf[name], matrix != 0)
        if all(lines.all() for lines in used):
            return self  # an analysis would find no channel
        graph = channel_groups(self.apply_fn, params, *sample)
        keep = graph.nonzero_channels(params)
        if not keep:
            return self
        apply_fn = graph.small_apply(keep)
        small = graph.shrink(params, keep, verify=False)
        products = Products(apply_fn, small, *sample, constant_masks=True)
        return Model(apply_fn, products, graph, keep)

    def shrink(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The parameters of this model, from those of the whole model."""
        return params if self.graph is None else self.graph.shrink(params, self.keep, verify=False)

    @property
    def removed(self) -> dict[str, int]:
        """Group of channels -> how many were removed."""
        if self.graph is None:
            return {}
        sizes = {name: self.graph.groups[name].size for name in self.keep}
        return {name: sizes[name] - np.shape(kept)[-1] for name, kept in self.keep.items()}

    def check_removed(self, params: tree_lib.PyTree) -> None:
        """Refuses parameters of the whole model of which other channels are zero.

        The pattern of zeros covers only matrices. Whether a channel can be left out may also depend on its bias.
        """
        if self.graph is None:
            return
        needed = self.graph.nonzero_channels(params)
        for name, kept in self.keep.items():
            if not np.array_equal(needed.get(name, ()), kept):
                raise ValueError(
                    f'the channels {name} that were removed from the model are not those that are zero in these '
                    'parameters: a bias, or another weight of theirs, has a part in the results; compile the model for '
                    'them'
                )


class PackedApply:
    """A model for packed parameters; made by `sparse.compile`.

    Attributes:
      report: what was measured and chosen.

    >>> from jaxpruner import sparse
    >>> params = {'w': jnp.eye(4, 8)}
    >>> apply, _, _ = sparse.compile(lambda params, x: x @ params['w'], params, jnp.ones((2, 4)), formats='smaller')
    >>> packed = apply.pack({'w': 2 * params['w']})
    >>> apply(packed, jnp.ones((1, 4)))
    Array([[2., 2., 2., 2., 0., 0., 0., 0.]], dtype=float32)
    """

    def __init__(
        self, model: Model, whole: Products, params: tree_lib.PyTree, report: ExecutionReport
    ):
        self.report = report
        self._model = model
        self._whole = whole
        self._formats: dict[str, formats.ExecutedFormat] = {}
        for name, layer in report.layers.items():
            format = formats.parse(layer.format)
            if format is not None:
                self._formats[name] = format
        # The arrays do not say which zeros they were packed from; those of other zeros may have the same shapes. A key
        # of a dictionary is part of the structure of a tree, which is also known while values are traced.
        self._key = f'pattern {report.pattern}'
        self.packed = self._pack(params)
        self._shapes = _shapes(self.packed)
        self._jitted = jax.jit(self._run)

    def pack(self, params: tree_lib.PyTree) -> Packed:
        """Packs other parameters with the same zeros, such as fine-tuned ones.

        Args:
          params: of the whole model, arrays.

        Raises:
          ValueError: other weights are zero, a removed channel is not, or a leaf has another shape.
        """
        found = pattern_of(matrices_of(self._whole, params))
        if found != self.report.pattern:
            raise ValueError(
                f'other weights of these parameters are zero: their pattern is {found}, and that of the compiled model '
                f'{self.report.pattern}; compile the model for them'
            )
        self._model.check_removed(params)
        return self._pack(params)

    def _pack(self, params: tree_lib.PyTree) -> Packed:
        products = self._model.products
        small = self._model.shrink(params)
        leaves, matrices = products.by_name(small), matrices_of(products, small)
        for name, format in self._formats.items():
            leaf, arrays = products.by_leaf[name], {}
            for key, array in format.pack(matrices[name], leaf).items():
                arrays[key] = jnp.asarray(array.reshape(*leaf.layers, *array.shape[1:]))
            leaves[name] = arrays
        return {self._key: leaves}

    def __call__(self, packed: Packed, *inputs: Any) -> Any:
        """Runs the compiled model, with inputs of any shape; also under `jit`, `grad` and `vmap`.

        Args:
          packed: what `compile` or `pack` returned.
          *inputs: as the model takes them.

        Raises:
          ValueError: the parameters are not those of this model, or were packed from other zeros.
        """
        return self._jitted(packed, *inputs)

    def _run(self, packed: Packed, *inputs: Any) -> Any:
        # This runs when the model is traced.
        if not isinstance(packed, Mapping) or list(packed) != [self._key]:
            found = list(packed) if isinstance(packed, Mapping) else type(packed).__name__
            raise ValueError(
                f'these parameters are not packed for this model: they are {found}, and not under {self._key!r}; give '
                'what compile returned, or apply.pack(params)'
            )
        shapes = _shapes(packed)
        for path in {**self._shapes, **shapes}:
            given, expected = shapes.get(path, 'missing'), self._shapes.get(path, 'nothing')
            if given != expected:
                raise ValueError(
                    f'{path} is {given} where this model has {expected}; give what compile returned, or '
                    'apply.pack(params)'
                )
        leaves, products = dict(packed[self._key]), self._model.products
        for name, format in self._formats.items():
            leaves[name] = format.operator(leaves[name], products.by_leaf[name])
        run = products.apply if self._formats else self._model.apply_fn
        return run(products.unflatten(leaves), *inputs)


def _shapes(packed: Packed) -> dict[str, str]:
    """Path of a leaf -> dtype and shape."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(packed):
        shapes[jax.tree_util.keystr(path)] = f'{leaf.dtype}{list(jnp.shape(leaf))}'
    return shapes


def pattern_of(matrices: Mapping[str, np.ndarray]) -> str:
    """A short name of the zeros of some leaves."""
    hasher = hashlib.sha256()
    for name, values in sorted(matrices.items()):
        hasher.update(f'{name} {values.shape}'.encode())
        hasher.update(np.packbits(values != 0).tobytes())
    return hasher.hexdigest()[:16]
