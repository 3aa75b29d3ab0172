"""The whole model, timed: dense, without its zero channels, and in the formats of its layers."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution.checking import check_results
from jaxpruner.sparse.execution.choosing import CHANNELS
from jaxpruner.sparse.execution.executed_formats.table import DENSE
from jaxpruner.sparse.execution.packed_models import Model, PackedApply
from jaxpruner.sparse.execution.report import ExecutionReport, LayerExecution
from jaxpruner.structure.latency import Call, in_turns, repeats_of

FORMATS = 'formats'
# How many times as fast as dense the whole model has to be; otherwise it stays dense.
_LEAST_GAIN = 1.02

Layers = Mapping[str, LayerExecution]


class Candidates(NamedTuple):
    """What the versions of a model are made of.

    Attributes:
      dense: the whole model.
      model: the one without its zero channels; the whole one if there are none.
      params: the parameters of the whole model.
      layers: the formats that were chosen for `model`.
      report: the report so far, whose channels are those that `model` lacks.
    """

    dense: Model
    model: Model
    params: tree_lib.PyTree
    layers: Layers
    report: ExecutionReport

    def versions(self) -> dict[str, PackedApply]:
        """The versions that are timed: the dense one first, and those that differ from it."""
        all_dense = {}
        for name, layer in self.layers.items():
            all_dense[name] = dataclasses.replace(layer, format=DENSE)
        with_dense_layers = dataclasses.replace(self.report, layers=all_dense)
        versions = {}
        if self.model.small is None:
            versions[DENSE] = self._version(self.dense, with_dense_layers)
        else:
            # The layers were measured without these channels; here all channels stay.
            with_all_channels = dataclasses.replace(self.report, channels={})
            versions[DENSE] = self._version(self.dense, with_all_channels)
            versions[CHANNELS] = self._version(self.model, with_dense_layers)
        if other_formats(self.layers):
            report = dataclasses.replace(self.report, layers=self.layers)
            versions[FORMATS] = self._version(self.model, report)
        return versions

    def _version(self, model: Model, report: ExecutionReport) -> PackedApply:
        return PackedApply(model, self.dense.products, self.params, report)


def fastest_version(candidates: Candidates, sample: tuple[Any, ...], rounds: int) -> PackedApply:
    """The fastest version of a model; the dense one unless another is faster.

    Raises:
      RuntimeError: its results are not those of the dense model.
    """
    versions = candidates.versions()
    calls: dict[str, Call] = {}
    for name, version in versions.items():
        calls[name] = _call(version, sample)
    times = _Times.of(calls, rounds)
    best = max(versions, key=times.gains.__getitem__)
    notes: tuple[str, ...] = ()
    if times.gains[best] < _LEAST_GAIN:
        best = DENSE
    if best == DENSE and len(versions) > 1:
        gain = max(times.gains[name] for name in versions if name != DENSE)
        notes = (f'the model stays dense: the best other version is {gain:.2f} times as fast',)
    apply = versions[best]
    if best != DENSE:
        results = calls[best]()
        dense_results = calls[DENSE]()
        check_results(results, dense_results, candidates.dense.products)
    apply.report = dataclasses.replace(
        apply.report,
        milliseconds=times.milliseconds(DENSE),
        measured=times.milliseconds(best),
        notes=notes,
    )
    return apply


def other_formats(layers: Layers) -> dict[str, str]:
    """The formats of the leaves that do not stay dense."""
    return {name: layer.format for name, layer in layers.items() if layer.format != DENSE}


class _Times(NamedTuple):
    """The times of whole calls, in turns.

    Attributes:
      dense_milliseconds: the time of the dense call.
      gains: name of a call -> how many times as fast as the dense call it is.
    """

    dense_milliseconds: float
    gains: Mapping[str, float]

    @classmethod
    def of(cls, calls: Mapping[str, Call], rounds: int) -> '_Times':
        """Times the calls."""
        repeats = list(map(repeats_of, calls.values()))
        times = in_turns(list(calls.values()), repeats, rounds)
        by_name = dict(zip(calls, times, strict=True))
        dense_seconds = by_name[DENSE]
        gains = {}
        for name, seconds in by_name.items():
            ratios = []
            for dense, mine in zip(dense_seconds, seconds, strict=True):
                ratios.append(dense / mine)
            gains[name] = statistics.median(ratios)
        dense_milliseconds = 1e3 * statistics.median(dense_seconds)
        return cls(dense_milliseconds, gains)

    def milliseconds(self, name: str) -> float:
        """The milliseconds of one of the calls."""
        return self.dense_milliseconds / self.gains[name]


def _call(apply: PackedApply, sample: tuple[Any, ...]) -> Call:
    return lambda: apply(apply.packed, *sample)
