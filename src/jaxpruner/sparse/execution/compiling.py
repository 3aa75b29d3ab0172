"""`sparse.compile`: a pruned model with each of its products in the fastest format."""

import dataclasses
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution import checking
from jaxpruner.sparse.execution.choosing import (
    CHANNELS,
    MEASURE,
    asked_layers,
    measured_layers,
)
from jaxpruner.sparse.execution.packed_models import (
    Model,
    Packed,
    PackedApply,
    matrices_of,
    pattern_of,
)
from jaxpruner.sparse.execution.removed_channels import without_zero_channels
from jaxpruner.sparse.execution.report import ExecutionReport
from jaxpruner.sparse.execution.versions import Candidates, fastest_version
from jaxpruner.sparse.program.models import find_products


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
    checking.check_rounds(rounds)
    params = tree_lib.as_arrays(params)
    checking.check_arrays('params', params)
    # Masks are applied to the packed weights, once.
    whole = find_products(apply_fn, params, *sample, constant_masks=True)
    checking.warn_of_several_devices(whole.leaves(params))
    matrices = matrices_of(whole, params)
    pattern = pattern_of(matrices)
    dense_model = Model(apply_fn, whole)
    dense_layers = {name: each.layer(None) for name, each in matrices.items()}
    report = ExecutionReport(
        layers=dense_layers,
        dense_leaves=whole.refused,
        pattern=pattern,
        device=device_name(),
    )
    is_measured = formats == MEASURE
    if is_measured:
        checking.check_arrays('the sample', sample)
    model = dense_model
    if is_measured or formats == CHANNELS:
        model = _without_zero_channels(dense_model, params, sample, matrices)
    if model.small is not None:
        matrices = matrices_of(model.products, model.shrink(params))
        report = dataclasses.replace(report, channels=model.small.removed)
    if is_measured:
        layers = measured_layers(matrices, rounds, progress)
        candidates = Candidates(dense_model, model, params, layers, report)
        apply = fastest_version(candidates, sample, rounds)
        return Compiled(apply, apply.packed, apply.report)
    if formats != CHANNELS:
        layers = asked_layers(matrices, model.products.refused, formats)
        report = dataclasses.replace(report, layers=layers)
    apply = PackedApply(model, whole, params, report)
    return Compiled(apply, apply.packed, report)


def device_name() -> str:
    """The device on which programs run, as reports name it."""
    # Arrays that nobody placed lie there; under a mesh these are several devices of one kind.
    device, *_ = jnp.zeros(()).devices()
    if device.platform != 'cpu':
        return device.device_kind
    return f'cpu, {platform.machine()}, {os.cpu_count()} cores'


def _without_zero_channels(
    model: Model, params: tree_lib.PyTree, sample: tuple[Any, ...], matrices: Any
) -> Model:
    """The model without its channels that are zero; the same model if there are none."""
    small = without_zero_channels(model.apply_fn, params, sample, matrices)
    if small is None:
        return model
    small_params = small.shrink(params)
    products = find_products(small.apply_fn, small_params, *sample, constant_masks=True)
    return Model(small.apply_fn, products, small)
