"""`sparse.compile`: a pruned model with each of its products in the fastest format."""

import dataclasses
import functools
import os
import platform
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution.choosing import (
    asked_layers,
    dense_layers,
    matrices_of,
    measured_layers,
)
from jaxpruner.sparse.execution.formats import DENSE
from jaxpruner.sparse.execution.packed_model import Model, Packed, PackedApply, pattern_of
from jaxpruner.sparse.execution.report import ExecutionReport
from jaxpruner.sparse.program.models import Products
from jaxpruner.structure.latency import in_turns, repeats_of

# What a setting may ask for beside formats.
MEASURE = 'measure'
CHANNELS = 'channels'
# How many times as fast as dense the whole model has to be; otherwise it stays dense.
_LEAST_GAIN = 1.02
# Differences up to these shares of the largest result count as rounding. GPUs and TPUs round products of float32 to
# fewer bits by default, and errors grow from layer to layer.
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

    apply: PackedApply
    packed: Packed
    report: ExecutionReport


def compile(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    *sample: Any,
    formats: Any = MEASURE,
    rounds: int = 11,
    progress: bool = True,
) -> Compiled:
    """Runs each product of a pruned model with its parameters in the format that is fastest for its zeros.

    A dense layer, a 1x1 convolution, and other convolutions can run as compact blocks (`sparse.operators.blocks`), in
    CSR, or as a smaller dense matrix without inputs and outputs that are zero. Channels that are zero in all layers are
    removed from the whole model.

    With `formats='measure'` each candidate is timed on this device at the batch of the sample, in turns with the dense
    product. The dense product stays unless another one is faster beyond noise. The smallest products, which together
    are a hundredth of all, stay dense without being timed. In the end the whole model is timed, and stays dense unless
    it is faster. Then its results at the sample are compared with those of the dense model. If formats are named,
    nothing is timed, compared or removed from the whole model; `'channels'` removes channels, and no more.

    For finite inputs the results are those of the dense model, up to the order in which floats are added. Weights that
    are zero are not multiplied, so infinite inputs give no NaN there.

    A compiled model runs on one device: leaves that lie on several are gathered when they are packed.

    Packed arrays may hold zeros: all of a leaf that stays dense, and those inside of kept blocks, inputs and outputs.
    Gradients change these zeros like any weights. In formats other than dense, they even change weights that the model
    itself masks with a constant. To fine-tune, mask the updates, or train the dense parameters and pack them.

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

    Warns if matrices lie on several devices.

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
    >>> report.layers['down'].bytes
    {'dense': 65536, 'smaller': 16640}
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f'rounds must be a whole number, got {rounds!r}')
    if rounds < 2:
        raise ValueError(
            f'rounds must be at least 2, got {rounds}; one timing says nothing of noise'
        )
    params = tree_lib.as_arrays(params)
    for name, tree in {'params': params, 'the sample': sample}.items():
        for leaf in jax.tree.leaves(tree) if name == 'params' or formats == MEASURE else []:
            if isinstance(leaf, jax.ShapeDtypeStruct) or tree_lib.is_traced(leaf):
                raise TypeError(f'{name} must be arrays with values, outside of jit; got {leaf}')
    # Masks are applied to the packed weights, once.
    whole = Products(apply_fn, params, *sample, constant_masks=True)
    spread = []
    for name, leaf in whole.leaves(params).items():
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            spread.append(name)
    if spread:
        caller_warnings.warn(
            f'compile: {", ".join(spread)} lie on several devices, and a compiled model runs on one: packed matrices '
            'are gathered there. Keep the dense model where it does not fit, or train it with block_sparse'
        )
    model, matrices = Model(apply_fn, whole), matrices_of(whole, params)
    report = ExecutionReport(
        layers=dense_layers(whole, matrices),
        dense_leaves=whole.refused,
        pattern=pattern_of(matrices),
        device=device_name(),
    )
    versions = [(model, report)]
    if formats in (MEASURE, CHANNELS):
        model = model.without_zero_channels(params, matrices, sample)
        matrices = matrices_of(model.products, model.shrink(params))
    if formats == MEASURE:
        layers = measured_layers(model.products, matrices, rounds, progress)
    elif formats == CHANNELS:
        layers = dense_layers(model.products, matrices)
    else:
        layers = asked_layers(model.products, matrices, formats)
    report = dataclasses.replace(report, layers=layers, channels=model.removed)
    if formats != MEASURE:
        apply = PackedApply(model, whole, params, report)
        return Compiled(apply, apply.packed, report)
    # What was measured stands in the report of a model that stays dense, too.
    in_dense = {name: dataclasses.replace(layer, format=DENSE) for name, layer in layers.items()}
    if not report.channels:
        versions.clear()
    versions.append((model, dataclasses.replace(report, layers=in_dense)))
    if in_dense != layers:
        versions.append((model, report))
    applies = [PackedApply(model, whole, params, report) for model, report in versions]
    apply = _fastest(applies, sample, rounds, whole)
    return Compiled(apply, apply.packed, apply.report)


def _fastest(
    applies: list[PackedApply], sample: tuple[Any, ...], rounds: int, products: Products
) -> PackedApply:
    """The fastest version of a model. The first is dense, and stays unless another is faster.

    Raises:
      RuntimeError: the results of the fastest are not those of the dense one.
    """
    calls = [functools.partial(apply, apply.packed, *sample) for apply in applies]
    times = in_turns(calls, [repeats_of(call) for call in calls], rounds)
    gains = []
    for seconds in times:
        ratios = [dense / mine for dense, mine in zip(times[0], seconds, strict=True)]
        gains.append(statistics.median(ratios))
    best, notes = gains.index(max(gains)), ()
    if gains[best] < _LEAST_GAIN:
        best = 0
    if best:
        _check_results(calls[best](), calls[0](), products)
    elif len(applies) > 1:
        most = max(gains[1:])
        notes = (f'the model stays dense: the best other version is {most:.2f} times as fast',)
    milliseconds = 1e3 * statistics.median(times[0])
    apply = applies[best]
    apply.report = dataclasses.replace(
        apply.report, milliseconds=milliseconds, measured=milliseconds / gains[best], notes=notes
    )
    return apply


def device_name() -> str:
    """The device on which programs run, as reports name it."""
    # Arrays that nobody placed lie there; under a mesh these are several devices of one kind.
    device, *_ = jnp.zeros(()).devices()
    if device.platform != 'cpu':
        return device.device_kind
    return f'cpu, {platform.machine()}, {os.cpu_count()} cores'


def _check_results(found: Any, expected: Any, products: Products) -> None:
    """Refuses a compiled model whose results differ from those of the dense one by more than rounding.

    Differences are relative to the largest of all results. Results that are infinite or no numbers are not compared.
    Whole numbers are compared only if the model computes with whole numbers alone: otherwise they follow from floats,
    and may change if two floats are about equal.
    """
    # The tolerance is that of the coarsest floats of products and results.
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(expected)]
    for leaf in products.by_leaf.values():
        dtypes += [leaf.computed_dtype, leaf.result_dtype]
    tolerance = max(
        [
            _TOLERANCES.get(jnp.finfo(dtype).dtype.name, _TOLERANCE_OF_NARROW_FLOATS)
            for dtype in dtypes
            if jnp.issubdtype(dtype, jnp.inexact)
        ],
        default=0,
    )
    compared = jnp.inexact if tolerance else jnp.number
    scale = 0.0
    differences = {}
    expected_results = jax.tree_util.tree_leaves_with_path(expected)
    for (path, dense), result in zip(expected_results, jax.tree.leaves(found), strict=True):
        if not jnp.issubdtype(dense.dtype, compared):
            continue
        wide = tree_lib.at_least_float32(dense.dtype)
        is_finite, dense = jnp.isfinite(dense), dense.astype(wide)
        for_all = jnp.where(is_finite, jnp.abs(result.astype(wide) - dense), 0)
        differences[jax.tree_util.keystr(path)] = float(for_all.max(initial=0))
        scale = max(scale, float(jnp.where(is_finite, jnp.abs(dense), 0).max(initial=0)))
    for name, difference in differences.items():
        if not difference <= tolerance * scale:  # NaN is not
            raise RuntimeError(
                f'compile: the result{name} of the compiled model differs by {difference:.3g} from that of the dense '
                f'model, whose largest result is {scale:.3g}; rounding explains up to {tolerance * scale:.3g}. Keep '
                "the model dense (formats='dense'); or, if its results jump where floats hardly differ, name formats, "
                'since then nothing is compared'
            )
