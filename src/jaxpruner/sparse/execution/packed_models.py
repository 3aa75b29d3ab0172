"""A model for packed parameters. These are plain arrays in dictionaries, and become operators inside of the program."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution.choosing import Matrices
from jaxpruner.sparse.execution.executed_formats import table
from jaxpruner.sparse.execution.executed_formats.base import ExecutedFormat
from jaxpruner.sparse.execution.removed_channels import SmallModel
from jaxpruner.sparse.execution.report import ExecutionReport
from jaxpruner.sparse.execution.zero_patterns import digest
from jaxpruner.sparse.program.models import Products

Packed = dict[str, Any]


class Model(NamedTuple):
    """A model that can run: the whole one, or the one without channels that are zero.

    Attributes:
      apply_fn: the function of its parameters.
      products: its products.
      small: the removal of channels; `None` for the whole model.
    """

    apply_fn: Callable[..., Any]
    products: Products
    small: SmallModel | None = None

    def shrink(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The parameters of this model, from those of the whole model."""
        return params if self.small is None else self.small.shrink(params)


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
        self._formats: dict[str, ExecutedFormat] = {}
        for name, layer in report.layers.items():
            format = table.parse(layer.format)
            if isinstance(format, ExecutedFormat):
                self._formats[name] = format
        self.packed = self._pack(params)
        self._shapes = _shapes(self.packed)
        self._jitted = jax.jit(self._run)

    @property
    def _key(self) -> str:
        """The key under which packed parameters lie.

        The arrays do not say which zeros they were packed from, and those of another pattern may have the same shapes.
        A key of a dictionary is part of the structure of a tree, which is also known while values are traced.
        """
        return f'pattern {self.report.pattern}'

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
        if self._model.small is not None:
            self._model.small.check_removed(params)
        return self._pack(params)

    def _pack(self, params: tree_lib.PyTree) -> Packed:
        products = self._model.products
        leaves = products.by_name(self._model.shrink(params))
        for name, format in self._formats.items():
            matrix_leaf = products.by_leaf[name]
            matrices = Matrices.of(matrix_leaf, leaves[name])
            arrays = {}
            for key, array in matrices.pack(format).items():
                _, *shape = array.shape
                of_layers = array.reshape(*matrix_leaf.layers, *shape)
                arrays[key] = jnp.asarray(of_layers)
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
        self._check(packed)
        leaves = dict(packed[self._key])
        products = self._model.products
        for name, format in self._formats.items():
            arrays = leaves[name]
            leaves[name] = format.operator(arrays, products.by_leaf[name])
        weights = products.unflatten(leaves)
        if not self._formats:
            return self._model.apply_fn(weights, *inputs)
        return products.apply(weights, *inputs)

    def _check(self, packed: Packed) -> None:
        """Refuses parameters that are not those of this model; it runs when the model is traced."""
        if not isinstance(packed, Mapping) or list(packed) != [self._key]:
            found = list(packed) if isinstance(packed, Mapping) else type(packed).__name__
            raise ValueError(
                f'these parameters are not packed for this model: they are {found}, and not under {self._key!r}; give '
                'what compile returned, or apply.pack(params)'
            )
        shapes = _shapes(packed)
        for path in {**self._shapes, **shapes}:
            given = shapes.get(path)
            expected = self._shapes.get(path)
            if given != expected:
                raise ValueError(
                    f'{path} is {given or "missing"} where this model has {expected or "nothing"}; give what compile '
                    'returned, or apply.pack(params)'
                )


def _shapes(packed: Packed) -> dict[str, str]:
    """Path of a leaf -> dtype and shape."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(packed):
        name = jax.tree_util.keystr(path)
        shapes[name] = f'{leaf.dtype}{list(jnp.shape(leaf))}'
    return shapes


def matrices_of(products: Products, params: tree_lib.PyTree) -> dict[str, Matrices]:
    """The matrices of the leaves of parameters."""
    matrices = {}
    for name, leaf in products.leaves(params).items():
        matrix_leaf = products.by_leaf[name]
        shape = jnp.shape(leaf)
        if shape != matrix_leaf.shape:
            raise ValueError(f'{name} has shape {shape}, and in the model {matrix_leaf.shape}')
        matrices[name] = Matrices.of(matrix_leaf, leaf)
    return matrices


def pattern_of(matrices: Mapping[str, Matrices]) -> str:
    """A short name of the zeros."""
    patterns = {name: each.pattern for name, each in matrices.items()}
    return digest(patterns)
