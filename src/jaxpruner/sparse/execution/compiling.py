"""`sparse.compile`: a pruned model with each of its products in the fastest format."""

import dataclasses
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.call_times import Call, in_turns, repeats_of
from jaxpruner.sparse.execution.choosing import asked_layers, measured_layers
from jaxpruner.sparse.execution.packed_models import (
    Model,
    Packed,
    PackedApply,
    matrices_of,
    pattern_of,
)
from jaxpruner.sparse.execution.predicting import empty_call, predicted_milliseconds
from jaxpruner.sparse.execution.removed_channels import without_zero_channels
from jaxpruner.sparse.execution.report import DENSE, ExecutionReport, LayerExecution
from jaxpruner.sparse.program.models import find_products

MEASURE = 'measure'
CHANNELS = 'channels'
# So much faster than dense the whole model has to be, or it stays dense.
_LEAST_GAIN = 1.02

Layers = Mapping[str, LayerExecution]


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
    removed from the whole model. Each candidate is timed on this device at the batch of the sample, in turns with the
    dense product, which stays unless another one is faster beyond noise; the smallest products, which together are a
    hundredth of all, stay dense without being timed. In the end the whole model is timed, and stays
    dense unless it is faster.

    Results are those of the dense model, up to the order in which floats are added. Whichever weights are zero stay so:
    the packed parameters hold the others alone.

    On CPUs set `MALLOC_MMAP_MAX_=0` and `MALLOC_TRIM_THRESHOLD_=20000000000` in the environment before Python starts:
    glibc else gives large buffers back to the system after each call, which can cost half of the time, dense or not.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace.
      params: any pytree of arrays, in which pruned weights are zero.
      *sample: inputs of the size that is to be fast; arrays, or shapes where nothing is measured.
      formats: `'measure'`; one format for all leaves that it suits, `'csr'`, `'smaller'`, `'blocks'`,
        `'blocks 8x128'` (inputs and outputs), `'dense'`, or `'channels'` to remove channels that are zero and no more;
        a mapping from names of leaves or globs to formats, in which leaves that are not named stay dense; or the report
        of an earlier call, whose choices are used again. Choices made on another device, or with another version of
        JAX, are measured anew.
      rounds: how often each candidate is timed.
      progress: show a progress bar.

    Returns:
      A function `apply(packed, *inputs)`, the packed parameters, and a report whose text is a table. The function can
      be differentiated (with `allow_int=True`, since positions are among the parameters), mapped over, and called with
      other batch sizes. `apply.pack(params)` packs other parameters with the same zeros.

    Raises:
      ValueError: a format or a name is unknown, or cannot be met; the report is of other zeros; there are no inputs.
      TypeError: the parameters, or a sample that is to be timed, have no values.

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
    params = tree_lib.as_arrays(params)
    _check_arrays('params', params)
    # Masks are applied to the packed weights, once.
    whole = find_products(apply_fn, params, *sample, constant_masks=True)
    matrices = matrices_of(whole, params)
    pattern = pattern_of(matrices)
    setting = _setting(formats, pattern)
    dense_model = Model(apply_fn, whole)
    report = ExecutionReport(
        layers={name: each.layer(None) for name, each in matrices.items()},
        dense_leaves=whole.refused,
        pattern=pattern,
        device=device_name(),
    )
    is_measured = setting == MEASURE
    if is_measured:
        _check_arrays('the sample', sample)
    model = dense_model
    if is_measured or setting == CHANNELS or getattr(setting, 'channels', None):
        model = _without_zero_channels(dense_model, params, sample, matrices)
    if model.small is not None:
        matrices = matrices_of(model.products, model.shrink(params))
        report = dataclasses.replace(report, channels=model.small.removed)
    if is_measured:
        layers = measured_layers(matrices, rounds, progress)
        versions = _versions(dense_model, model, params, report, layers)
        return _fastest(versions, model, params, sample, rounds)
    if isinstance(setting, ExecutionReport):
        report = setting
    elif setting != CHANNELS:
        report = dataclasses.replace(report, layers=asked_layers(matrices, setting))
    apply = PackedApply(model, whole, params, report)
    return Compiled(apply, apply.packed, report)


def device_name() -> str:
    """The device on which programs run, as reports name it."""
    (device,) = jnp.zeros(()).devices()  # where arrays go that nobody placed
    if device.platform != 'cpu':
        return device.device_kind
    return f'cpu, {platform.machine()}, {os.cpu_count()} cores'


def _setting(formats: Any, pattern: str) -> Any:
    """The formats that are asked for: a report only if it was measured here."""
    if not isinstance(formats, ExecutionReport):
        return formats
    if formats.pattern != pattern:
        raise ValueError(
            f'formats: the report was made for weights with the pattern {formats.pattern}, and these have {pattern}: '
            "other weights are zero, or layers have other shapes; compile with formats='measure'"
        )
    is_from_here = (formats.device, formats.jax) == (device_name(), jax.__version__)
    return formats if is_from_here else MEASURE


def _check_arrays(name: str, tree: tree_lib.PyTree) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) or tree_lib.is_traced(leaf):
            raise TypeError(f'{name} must be arrays with values, outside of jit; got {leaf}')


def _without_zero_channels(
    model: Model, params: tree_lib.PyTree, sample: tuple[Any, ...], matrices: Any
) -> Model:
    """The model without its channels that are zero; the same model if there are none."""
    small = without_zero_channels(model.apply_fn, params, sample, matrices)
    if small is None:
        return model
    products = find_products(
        small.apply_fn, small.shrink(params), *sample, constant_masks=True
    )
    return Model(small.apply_fn, products, small)


def _versions(
    dense_model: Model,
    model: Model,
    params: tree_lib.PyTree,
    report: ExecutionReport,
    layers: Layers,
) -> list[PackedApply]:
    """The versions of the model that are timed as a whole: dense, with fewer channels, and in the formats chosen."""
    all_dense = {name: dataclasses.replace(each, format=DENSE) for name, each in layers.items()}
    whole = dense_model.products
    small_dense = dataclasses.replace(report, layers=all_dense)
    dense = small_dense if model.small is None else dataclasses.replace(report, channels={})
    versions = [PackedApply(dense_model, whole, params, dense)]
    if model.small is not None:
        versions.append(PackedApply(model, whole, params, small_dense))
    if _other_formats(layers):
        chosen = dataclasses.replace(report, layers=layers)
        versions.append(PackedApply(model, whole, params, chosen))
    return versions


class _Compared(NamedTuple):
    """Whole calls, timed in turns.

    Attributes:
      milliseconds: of the first, which is dense.
      gains: how many times as fast as the first each is.
    """

    milliseconds: float
    gains: list[float]

    @classmethod
    def of(cls, calls: Sequence[Call], rounds: int) -> '_Compared':
        """Times them."""
        repeats = list(map(repeats_of, calls))
        times = in_turns(calls, repeats, rounds)
        first, *_ = times
        gains = []
        for seconds in times:
            ratios = [dense / mine for dense, mine in zip(first, seconds, strict=True)]
            gains.append(statistics.median(ratios))
        return cls(1e3 * statistics.median(first), gains)

    def milliseconds_of(self, number: int) -> float:
        """Of one of the calls."""
        return self.milliseconds / self.gains[number]


def _fastest(
    versions: Sequence[PackedApply],
    model: Model,
    params: tree_lib.PyTree,
    sample: tuple[Any, ...],
    rounds: int,
) -> Compiled:
    """The fastest version of a model, of which the first is dense; that one unless another is faster."""
    calls = [_call(version, sample) for version in versions]
    other_formats = _other_formats(versions[-1].report.layers)
    if other_formats:
        in_dense = dict.fromkeys(other_formats, DENSE)
        calls.append(empty_call(model, params, in_dense, sample))
        calls.append(empty_call(model, params, other_formats, sample))
    compared = _Compared.of(calls, rounds)
    gains = compared.gains[: len(versions)]
    best = max(range(len(versions)), key=gains.__getitem__)
    notes: tuple[str, ...] = ()
    if gains[best] < _LEAST_GAIN:
        best = 0
    if best == 0 and len(versions) > 1:
        notes = (
            f'the model stays dense: the best other version is {max(gains[1:]):.2f} times as fast',
        )
    apply = versions[best]
    report = apply.report
    # The model with dense products, and with as many channels.
    predicted = compared.milliseconds_of(1 if report.channels else 0)
    if _other_formats(report.layers):
        empty = compared.milliseconds_of(-2), compared.milliseconds_of(-1)
        predicted = predicted_milliseconds(predicted, *empty, report.layers)
    apply.report = dataclasses.replace(
        report,
        milliseconds=compared.milliseconds,
        predicted=predicted,
        measured=compared.milliseconds_of(best),
        notes=notes,
    )
    return Compiled(apply, apply.packed, apply.report)


def _other_formats(layers: Layers) -> dict[str, str]:
    """The formats of the leaves that do not stay dense."""
    return {name: layer.format for name, layer in layers.items() if layer.format != DENSE}


def _call(apply: PackedApply, sample: tuple[Any, ...]) -> Call:
    return lambda: apply(apply.packed, *sample)
