"""`sparse.compile`: a pruned model with each of its products in the fastest format."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution import choosing
from jaxpruner.sparse.products import Products
from jaxpruner.structure import channel_groups
from jaxpruner.structure.costs import in_turns

Packed = dict[str, Any]

# What a setting may ask for beside formats.
MEASURE = 'measure'
CHANNELS = 'channels'
# How many times as fast as dense the whole model has to be; otherwise it stays dense.
_LEAST_GAIN = 1.02
# Differences up to this share of the largest result count as rounding: GPUs and TPUs round products of float32 to fewer
# bits by default, and errors grow from layer to layer.
_TOLERANCES = {'float64': 1e-6, 'float32': 1e-2, 'float16': 0.05, 'bfloat16': 0.1}
_TOLERANCE_OF_NARROW_FLOATS = 0.3


class Compiled(NamedTuple):
    """What `sparse.compile` returns.

    Attributes:
      apply: `(packed, *inputs) -> results`.
      packed: the packed parameters: plain arrays in dictionaries.
      report: what was measured and chosen.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.eye(4, 8)}
    >>> compiled = compile(lambda params, x: x @ params['w'], params, jnp.ones((2, 4)), formats='smaller')
    >>> compiled.apply(compiled.packed, jnp.ones((1, 4)))
    Array([[1., 1., 1., 1., 0., 0., 0., 0.]], dtype=float32)
    """

    apply: 'PackedApply'
    packed: Packed
    report: choosing.ExecutionReport


def compile(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    *sample: Any,
    formats: Any = MEASURE,
    rounds: int = 11,
    progress: bool = True,
) -> Compiled:
    """Runs each product of a pruned model with its parameters in the format that is fastest for its zeros.

    A dense layer, a 1x1 convolution, and other convolutions can run as compact blocks (`sparse.block_matrix`), in
    CSR, or as a smaller dense matrix without inputs and outputs that are zero. Channels that are zero in all layers are
    removed from the whole model.

    With `formats='measure'` each candidate is timed on this device at the batch of the sample, in turns with the dense
    product. The dense product stays unless another one is faster beyond noise. Products that are less
    than a thousandth of all stay dense without being timed. In the end the whole model is timed, and stays dense unless
    it is faster. Then its results at the sample are compared with those of the dense model. If formats are named,
    nothing is timed, compared or removed from the whole model; `'channels'` removes channels, and no more.

    For finite inputs the results are those of the dense model, up to the order in which floats are added. Weights that
    are zero are not multiplied, so infinite inputs give no NaN there.

    A compiled model runs on one device: leaves that lie on several are gathered when they are packed.

    Packed arrays may hold zeros: all of a leaf that stays dense, and those inside of kept blocks, inputs and outputs.
    Gradients change these zeros like any weights. To fine-tune, mask the updates, or train the dense parameters and
    pack them.

    On CPUs set `MALLOC_MMAP_MAX_=0` and `MALLOC_TRIM_THRESHOLD_=20000000000` in the environment before Python starts.
    Otherwise glibc gives large buffers back to the system after each call, which can cost half of the time, dense or
    not.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace.
      params: any pytree of arrays, in which pruned weights are zero.
      *sample: inputs of the size that is to be fast; arrays, or shapes if nothing is measured.
      formats: `'measure'`; one format for all leaves that it suits, `'csr'`, `'smaller'`, `'blocks'`,
        `'blocks 8x128'` (inputs and outputs), `'dense'`, or `'channels'`; or a mapping from names of leaves or globs to
        formats, in which leaves that are not named stay dense.
      rounds: how often each candidate is timed, at least twice.
      progress: show a progress bar.

    Returns:
      A function `apply(packed, *inputs)`, the packed parameters, and a report whose text is a table. The function can
      be differentiated (with `allow_int=True`, since positions are among the parameters), vectorized with `jax.vmap`,
      and called with other batch sizes. `apply.pack(params)` packs other parameters with the same zeros.

    Raises:
      ValueError: a format or a name is unknown, or cannot be met; there are no inputs.
      TypeError: the parameters, or a sample that is to be timed, have no values; `rounds` is no whole number.
      RuntimeError: formats were measured, and the results of the fastest model are not those of the dense one.

    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> def apply_fn(params, x):
    ...     return jnp.tanh(x @ params['up']) @ params['down']
    >>> params = {'up': jnp.eye(64, 256), 'down': jnp.eye(256, 64)}
    >>> x = jnp.ones((4, 64))
    >>> apply, packed, report = sparse.compile(apply_fn, params, x, formats={'up': 'blocks 8x64', '*': 'smaller'})
    >>> bool(jnp.allclose(apply(packed, x), apply_fn(params, x)))
    True
    >>> {name: layer.format for name, layer in report.layers.items()}
    {'down': 'smaller', 'up': 'blocks 8x64'}
    """
    if not isinstance(rounds, int) or rounds < 2:
        raise ValueError(f'rounds must be a whole number, at least 2, got {rounds!r}')
    params = tree_lib.as_arrays(params)
    for leaf in jax.tree.leaves((params, sample if formats == MEASURE else ())):
        if isinstance(leaf, jax.ShapeDtypeStruct) or tree_lib.is_traced(leaf):
            raise TypeError(f'compile: {leaf} has no values; call it outside of jit, with arrays')
    whole = Products(apply_fn, params, *sample)
    dense = model = _Model(apply_fn, whole)
    if formats in (MEASURE, CHANNELS):
        model = dense.without_zero_channels(params, sample)
    chosen: choosing.Formats = {}
    milliseconds = {}
    matrices = model.matrices(params)
    if formats == MEASURE:
        chosen, milliseconds = choosing.measured_formats(model.products, matrices, rounds, progress)
    elif formats != CHANNELS:
        chosen = choosing.asked_formats(model.products, matrices, formats)

    def version(model: _Model, chosen: choosing.Formats) -> PackedApply:
        layers, removed = {}, {}
        for name, matrix in model.matrices(params).items():
            leaf, format = model.products.by_leaf[name], str(chosen.get(name, choosing.DENSE))
            shape, density = (*leaf.layers, leaf.inputs, leaf.outputs), float((matrix != 0).mean())
            times = milliseconds.get(name, {})
            layers[name] = choosing.LayerExecution(shape, density, format, times)
        for name, kept in model.keep.items():
            removed[name] = model.graph.groups[name].size - np.shape(kept)[-1]
        report = choosing.ExecutionReport(layers, whole.refused, removed)
        return PackedApply(whole, params, model, chosen, report)

    versions = [(dense, {})]
    if model.keep:
        versions.append((model, {}))
    if chosen:
        versions.append((model, chosen))
    if formats == MEASURE:
        apply = _fastest([version(*each) for each in versions], sample, rounds)
    else:
        apply = version(*versions[-1])
    return Compiled(apply, apply.packed, apply.report)


def _fastest(applies: 'list[PackedApply]', sample: tuple[Any, ...], rounds: int) -> 'PackedApply':
    """The fastest version of a model. The first is dense, and stays unless another is faster.

    Raises:
      RuntimeError: the results of the fastest are not those of the dense one.
    """
    calls = [functools.partial(apply, apply.packed, *sample) for apply in applies]
    times = np.array(in_turns(calls, rounds))
    gains = np.median(times[0] / times, 1).tolist()
    best = gains.index(max(gains))
    if gains[best] < _LEAST_GAIN:
        best = 0
    if best:
        _check_results(calls[best](), calls[0](), applies[0].products)
    milliseconds = 1e3 * float(np.median(times[0]))
    apply = applies[best]
    apply.report = dataclasses.replace(
        apply.report, milliseconds=milliseconds, measured=milliseconds / gains[best]
    )
    return apply


def _check_results(found: Any, expected: Any, products: Products) -> None:
    """Refuses a compiled model whose results differ from those of the dense one by more than rounding.

    Differences are relative to the largest of all results. Results that are infinite or no numbers are not compared.
    Whole numbers are compared only if the model computes with whole numbers alone: otherwise they follow from floats,
    and may change if two floats are about equal.
    """
    # The tolerance is that of the coarsest floats of products and results.
    dtypes = [leaf.computed_dtype for leaf in products.by_leaf.values()]
    dtypes += [leaf.dtype for leaf in jax.tree.leaves(expected)]
    floats = [jnp.finfo(each).dtype.name for each in dtypes if jnp.issubdtype(each, jnp.inexact)]
    tolerance = max(
        (_TOLERANCES.get(name, _TOLERANCE_OF_NARROW_FLOATS) for name in floats), default=0
    )
    compared = jnp.inexact if floats else jnp.number
    scale = difference = 0.0
    for dense, result in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(dense.dtype, compared):
            wide = tree_lib.at_least_float32(dense.dtype)
            finite = jnp.where(jnp.isfinite(dense), dense, 0).astype(wide)
            own = jnp.where(jnp.isfinite(dense), jnp.abs(result.astype(wide) - finite), 0)
            difference = float(np.maximum(difference, own.max(initial=0)))  # NaN stays
            scale = max(scale, float(jnp.abs(finite).max(initial=0)))
    if not difference <= tolerance * scale:  # NaN is not
        raise RuntimeError(
            f'compile: a result of the compiled model differs by {difference:.3g} from that of the dense model, whose '
            f'largest result is {scale:.3g}; rounding explains up to {tolerance * scale:.3g}. Keep the model dense '
            "(formats='dense'); or, if its results jump where floats hardly differ, name formats, since then nothing "
            'is compared'
        )


class _Model(NamedTuple):
    """A model that can run: the whole one, or one without channels that are zero, since then all layers shrink.

    Attributes:
      apply_fn: the function of its parameters.
      products: its products.
      graph: the `ChannelGraph` of the whole model; `None` for the whole model.
      keep: the channels that stay.
    """

    apply_fn: Callable[..., Any]
    products: Products
    graph: Any = None
    keep: Mapping[str, np.ndarray] = {}

    def matrices(self, params: tree_lib.PyTree) -> dict[str, np.ndarray]:
        """The matrices [layers, inputs, outputs] of its leaves, from the parameters of the whole model."""
        matrices = {}
        for name, leaf in self.products.leaves(self.shrink(params)).items():
            matrix_leaf = self.products.by_leaf[name]
            values = np.asarray(matrix_leaf.to_matrix(leaf))
            matrices[name] = values.reshape(-1, matrix_leaf.inputs, matrix_leaf.outputs)
        return matrices

    def without_zero_channels(self, params: tree_lib.PyTree, sample: tuple[Any, ...]) -> '_Model':
        """The model without channels that are zero in these parameters; the same model if there are none."""
        used = []
        for name, matrix in self.matrices(params).items():
            used += choosing.used_lines(self.products.by_leaf[name], matrix != 0)
        if all(lines.all() for lines in used):
            return self  # an analysis would find no channel
        graph = channel_groups(self.apply_fn, params, *sample)
        keep = graph.nonzero_channels(params)
        if not keep:
            return self
        apply_fn = graph.small_apply(keep)
        small = graph.shrink(params, keep, verify=False)
        return _Model(apply_fn, Products(apply_fn, small, *sample), graph, keep)

    def shrink(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The parameters of this model, from those of the whole model."""
        return params if self.graph is None else self.graph.shrink(params, self.keep, verify=False)


class PackedApply:
    """A model for packed parameters; made by `sparse.compile`. These become operators inside of the program.

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
        self,
        whole: Products,
        params: tree_lib.PyTree,
        model: _Model,
        formats: choosing.Formats,
        report: choosing.ExecutionReport,
    ):
        self.report = report
        self.products = whole
        self._model = model
        self._formats = formats
        self.packed = self._pack(params)
        self._shapes = _shapes(self.packed)
        self._jitted = jax.jit(self._run)

    def pack(self, params: tree_lib.PyTree) -> Packed:
        """Packs other parameters with the same zeros, such as fine-tuned ones.

        Args:
          params: of the whole model, arrays.

        Raises:
          ValueError: other weights are zero, so that arrays get another size; a removed channel is not zero; or a leaf
            has another shape.
        """
        graph = self._model.graph
        needed = {} if graph is None else graph.nonzero_channels(params)
        for name, kept in self._model.keep.items():
            if not np.array_equal(needed.get(name, ()), kept):
                raise ValueError(
                    f'the channels {name} that were removed from the model are not those that are zero in these '
                    'parameters: a bias, or another weight of theirs, has a part in the results; compile the model for '
                    'them'
                )
        packed = self._pack(params)
        if _shapes(packed) != self._shapes:
            raise ValueError(
                'other weights of these parameters are zero than of those that the model was compiled for, so that '
                'arrays get another size; compile it for them'
            )
        return packed

    def _pack(self, params: tree_lib.PyTree) -> Packed:
        products = self._model.products
        packed = products.by_name(self._model.shrink(params))
        matrices = self._model.matrices(params)
        for name, format in self._formats.items():
            leaf, arrays = products.by_leaf[name], {}
            for key, array in format.pack(matrices[name], leaf).items():
                arrays[key] = jnp.asarray(array.reshape(*leaf.layers, *array.shape[1:]))
            packed[name] = arrays
        return packed

    def __call__(self, packed: Packed, *inputs: Any) -> Any:
        """Runs the compiled model, with inputs of any shape; also under `jit`, `grad` and `vmap`.

        Args:
          packed: what `compile` or `pack` returned.
          *inputs: as the model takes them.

        Raises:
          ValueError: the parameters are not packed for this model.
        """
        return self._jitted(packed, *inputs)

    def _run(self, packed: Packed, *inputs: Any) -> Any:
        # This runs when the model is traced.
        if _shapes(packed) != self._shapes:
            raise ValueError(
                'these parameters are not packed for this model: it has other names or shapes; give what compile '
                'returned, or apply.pack(params)'
            )
        leaves, products = dict(packed), self._model.products
        for name, format in self._formats.items():
            leaves[name] = format.matrix(**leaves[name])
        run = products.apply if self._formats else self._model.apply_fn
        return run(products.unflatten(leaves), *inputs)


def _shapes(packed: Any) -> Any:
    """Shapes and dtypes of all arrays, in their tree."""
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), packed)
