"""Makes a model that is trained on single weights."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxpruner import selection, sparsity_distributions, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.models import Products, find_products
from jaxpruner.sparse.training import choosing
from jaxpruner.sparse.training.layouts import NoLayoutError
from jaxpruner.sparse.training.moving import MoveSettings
from jaxpruner.sparse.training.only_setting import Names, OnlySetting, first_reasons
from jaxpruner.sparse.training.plans import BlockPlan, PlannedLeaf
from jaxpruner.sparse.training.unstructured_models import UnstructuredSparse
from jaxpruner.sparse.training.unstructured_positions import KeptWeights

_HEADING = 'kept weights, or why it stays dense'


def unstructured_sparse(
    apply_fn: Callable[..., Any],
    params: Any,
    *sample: Any,
    sparsity: float | Mapping[Any, float | None],
    only: Names | None = None,
    algorithm: str = 'static_sparse',
    scheduler: sparsity_schedules.BaseSchedule | None = None,
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.3),
    rng_seed: int = 8,
) -> UnstructuredSparse:
    """Makes a model in which single weights are stored, multiplied and trained: faster than dense from 90 % on.

    It trains like the dense model under an unstructured mask: static, by SET or by RigL, with an optimizer that treats
    each weight by itself. Products run through JAX's kernel for matrices in CSR. JAX has it from 0.6.1 on, for CPUs,
    float32 and float64. Blocks (`block_sparse`) are faster at any sparsity, and cost accuracy.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: the parameters, arrays or shapes.
      *sample: inputs, arrays or shapes.
      sparsity: the share of the weights of each matrix that is not stored, or by name or glob of the leaf.
      only: names or globs of the leaves that are meant; by default all matrices but convolutions.
      algorithm: `'static_sparse'`, `'set'` or `'rigl'`, as in configurations.
      scheduler: when weights are dropped and grown, such as `PeriodicSchedule`; by default never. Its sparsity may not
        change.
      drop_fraction_fn: step -> the share of the kept weights that is dropped then.
      rng_seed: the seed of positions, a whole number or a key.

    Returns:
      A model that holds no arrays: `pack` makes them.

    Raises:
      NotImplementedError: there is no kernel for this dtype, device or version of JAX; the message says what helps.
      ValueError: a setting is out of range, or a name means no matrix.
      TypeError: a setting has the wrong type.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((16, 32)), 'bias': jnp.zeros(32)}
    >>> def apply_fn(params, x):
    ...     return x @ params['kernel'] + params['bias']
    >>> if csr_kernel.why_missing(jnp.float32) is None:
    ...     model = unstructured_sparse(apply_fn, params, jnp.ones((2, 16)), sparsity=0.95)
    ...     weights, topology = model.pack(params)
    ...     assert weights['kernel']['compressed'].shape == (26,)
    """
    for name, value in choosing.by_name(sparsity, 'sparsity').items():
        if value is not None:
            sparsity_distributions.check_sparsity(value, name)
    schedule = sparsity_schedules.NoUpdateSchedule() if scheduler is None else scheduler
    moves = MoveSettings(algorithm, schedule, drop_fraction_fn, rng_seed)
    products = find_products(apply_fn, params, *sample)
    leaves, reasons = _choose(products, sparsity, only)
    plan = _plan(products, leaves, reasons)
    return UnstructuredSparse(products, plan, moves, leaves)


def _choose(
    products: Products, sparsity: Any, only: Names | None
) -> tuple[dict[str, KeptWeights], dict[str, str]]:
    """The leaves of which single weights are kept, and why the others stay dense."""
    meant = OnlySetting.of(only, products)
    paths = [matrix_leaf.path for matrix_leaf in products.by_leaf.values()]
    sparsity_of = choosing.lookup(sparsity, paths, 'sparsity')
    reasons = dict(products.refused)
    leaves = {}
    for name, matrix_leaf in products.by_leaf.items():
        leaf_sparsity = sparsity_of(matrix_leaf.path)
        try:
            leaves[name] = _kept_weights(matrix_leaf, meant, leaf_sparsity)
        except NoLayoutError as error:
            reasons[name] = str(error)
    if not leaves:
        why = first_reasons(reasons)
        raise ValueError(f'no leaf of the model can be trained in CSR. {why}')
    return leaves, reasons


def _kept_weights(
    matrix_leaf: MatrixLeaf, only: OnlySetting, sparsity: float | None
) -> KeptWeights:
    """How many weights of a leaf are kept.

    Raises:
      NoLayoutError: the leaf stays dense; the message says why.
      NotImplementedError: there is no kernel for it.
    """
    sparsity = only.checked_sparsity(matrix_leaf, sparsity)
    only.check_convolution(matrix_leaf)
    missing = csr_kernel.why_missing(matrix_leaf.computed_dtype)
    if missing:
        raise NotImplementedError(f'{matrix_leaf.name} cannot be trained in CSR: {missing}')
    inputs, outputs = matrix_leaf.inputs, matrix_leaf.outputs
    kept = selection.number_to_keep_on_host(inputs * outputs, sparsity)
    return KeptWeights(matrix_leaf.layers, inputs, outputs, kept)


def _plan(
    products: Products, leaves: Mapping[str, KeptWeights], reasons: Mapping[str, str]
) -> BlockPlan:
    planned = {}
    paths, shapes, _ = tree_lib.flatten_with_paths(products.params)
    for path, shape in zip(paths, shapes, strict=True):
        name = tree_lib.path_string(path)
        leaf = leaves.get(name)
        kept = shape.size if leaf is None else leaf.kept * leaf.matrices
        note = reasons.get(name, '')
        planned[name] = PlannedLeaf(name, shape.shape, leaf, kept, note)
    return BlockPlan(planned, _HEADING)
