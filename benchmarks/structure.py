"""Models with half of the channels of each group, against the whole ones: what smaller shapes save.

The first rows say how long it takes to find groups once a model is traced, the last ones what a budget of latency
predicts, and what is measured after.
"""

import dataclasses
import fnmatch
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from benchmarks.models import Batch, Mlp, Params, Transformer, mean_cross_entropy
from benchmarks.report import Row, Value
from benchmarks.resnet import Resnet
from benchmarks.timing import interleaved, ratio
from benchmarks.training import METHODS, compiled_step
from jaxpruner import ChannelGraph, channel_groups

ROUNDS = 15
SECONDS = 10
COLUMNS = (
    'times as fast',
    'at least',
    'as predicted',
    'milliseconds',
    'share of memory',
    'share of parameters',
    'share of FLOPs',
    'seconds',
    'limit in seconds',
)
LATENCY_BUDGET = 0.5


class Case(NamedTuple):
    """A model, and what is cut of it.

    Attributes:
      model: of benchmarks.models.
      at_least: how many times as fast its smaller version has to be.
      halved: globs of the groups of which half the channels stay.
      has_budget: whether a version of half the latency is looked for, too.
    """

    model: Any
    at_least: float
    halved: tuple[str, ...] = ('*',)
    has_budget: bool = True


class Cases(NamedTuple):
    """The models of a size.

    Attributes:
      deep_transformer: of which the groups are found; likewise `deep_resnet`.
      are_long: whether all models take longer than handing a program over, so that smaller ones are faster. Else only
        the MLP's latency has a budget, and no model is scanned.
    """

    mlp: Mlp
    transformer: Transformer
    resnet: Resnet
    deep_transformer: Transformer
    deep_resnet: Resnet
    are_long: bool = True

    def timed(self) -> dict[str, Case]:
        """Models of which the smaller version is timed. Of the transformers the features of a head stay."""
        widths = '-'.join(map(str, self.mlp.widths))
        transformer = (
            f'transformer of {self.transformer.blocks} blocks, width {self.transformer.width}'
        )
        scanned = dataclasses.replace(self.transformer, scanned=True)
        globs = ('tokens*', '*query/kernel*:*:*', '*/up/*')
        cases = {
            f'MLP {widths}': Case(self.mlp, 3.0),
            transformer: Case(self.transformer, 3.5, globs, self.are_long),
            f'ResNet of {_layers(self.resnet)} layers': Case(
                self.resnet, 2.2, has_budget=self.are_long
            ),
        }
        if self.are_long:
            cases[f'{transformer}, scanned'] = Case(scanned, 3.5, globs, has_budget=False)
        return cases

    def analysed(self) -> dict[str, tuple[Any, float]]:
        """Models of which the groups are found, and limits in seconds."""
        blocks = self.deep_transformer.blocks
        return {
            f'transformer of {blocks} blocks': (self.deep_transformer, 0.5),
            f'ResNet of {_layers(self.deep_resnet)} layers': (self.deep_resnet, 2.0),
        }


def _layers(model: Resnet) -> int:
    return 2 * len(model.widths) * model.blocks + 2


def _transformer(blocks: int, batch_size: int, sequence: int, width: int = 512) -> Transformer:
    return Transformer(
        blocks, width, 8, 256, batch_size=batch_size, sequence=sequence, rms_norm=True
    )


_DEEP_RESNET = Resnet((16, 32, 64), 17, image=32, batch_size=1)
CASES = {
    'small': Cases(
        Mlp((64, 2048, 8), batch_size=256),
        _transformer(1, 2, 8, width=16),
        Resnet((4, 8), 1, image=8, batch_size=2),
        _transformer(2, 1, 8, width=16),
        Resnet((4, 8), 1, image=8, batch_size=1),
        are_long=False,
    ),
    'cpu': Cases(
        Mlp((784, 1024, 4096, 1024, 10), batch_size=128),
        _transformer(2, batch_size=16, sequence=32),
        Resnet((64, 128, 256), 2, image=32, batch_size=16),
        _transformer(12, batch_size=1, sequence=128),
        _DEEP_RESNET,
    ),
    'gpu': Cases(
        Mlp((784, 1024, 4096, 1024, 10), batch_size=8192),
        _transformer(4, batch_size=64, sequence=512),
        Resnet((64, 128, 256), 2, image=32, batch_size=1024),
        _transformer(12, batch_size=1, sequence=128),
        _DEEP_RESNET,
    ),
}


def run(size: str, rounds: int) -> Iterator[Row]:
    """Finds groups, then times smaller models, then looks for those of half the latency."""
    cases = CASES[size]
    for title, (model, limit) in cases.analysed().items():
        columns = {'seconds': _seconds_of_analysis(model), 'limit in seconds': limit}
        yield _row(f'groups of a {title}, beyond tracing', columns)
    for title, case in cases.timed().items():
        yield from _rows_of_case(title, case, rounds)
    for title, case in cases.timed().items():
        if case.has_budget:
            yield _row_of_budget(title, case, rounds)


def _row(name: str, columns: Mapping[str, Value]) -> Row:
    if not columns.keys() <= set(COLUMNS):
        raise KeyError(f'no columns {sorted(columns.keys() - set(COLUMNS))}')
    return Row(name, tuple(map(columns.get, COLUMNS)))


def _seconds_of_analysis(model: Any) -> float:
    """Once, as users wait for it: nothing of the model was analysed before. Tracing is timed apart, and taken off."""
    arguments = jax.eval_shape(model.init), model.batch().inputs

    def seconds(analyse: Callable[..., Any]) -> float:
        def apply_fn(params: Params, inputs: Any) -> Any:  # a new function is traced anew
            return model.logits(params, inputs)

        began = time.perf_counter()
        analyse(apply_fn, *arguments)
        return time.perf_counter() - began

    def trace(apply_fn: Callable[..., Any], *arguments: Any) -> None:
        jax.make_jaxpr(apply_fn)(*arguments)

    seconds(trace)  # functions of JAX inside are traced once for all
    tracing = seconds(trace)
    return seconds(channel_groups) - tracing


class _Version:
    """The whole model, or a smaller one.

    Attributes:
      programs: what is timed, by name: inference and a training step, each a function without arguments.
      bytes: the most that each of them has in memory at once.
    """

    def __init__(self, apply_fn: Callable[..., Any], params: Params, batch: Batch):
        self.programs: dict[str, Callable[[], Any]] = {}
        self.bytes: dict[str, int] = {}
        inference = jax.jit(apply_fn).lower(params, batch.inputs).compile()
        self._add('inference', inference, lambda: inference(params, batch.inputs))

        method = METHODS['dense']
        self._carried = params, method.optimizer().init(params)
        step = compiled_step(_Trained(apply_fn), method)
        compiled = step.lower(*self._carried, batch).compile()

        def train() -> Any:
            self._carried = compiled(*self._carried, batch)
            return self._carried

        # The step takes the memory of what is carried.
        self._carried = jax.tree.map(lambda leaf: leaf.copy(), self._carried)
        self._add('training step', compiled, train)

    def _add(self, name: str, compiled: Any, call: Callable[[], Any]) -> None:
        memory = compiled.memory_analysis()
        taken = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        self.programs[name] = call
        self.bytes[name] = taken


@dataclasses.dataclass(frozen=True)
class _Trained:
    """What a training step needs of a model."""

    apply_fn: Callable[..., Any]

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        return mean_cross_entropy(self.apply_fn(params, batch.inputs), batch.labels)


def _rows_of_case(title: str, case: Case, rounds: int) -> list[Row]:
    model = case.model
    params, batch = jax.jit(model.init)(), model.batch()
    graph = channel_groups(model.logits, params, batch.inputs)
    names = _names(graph, case)
    choice = graph.choose(params, counts={name: graph.groups[name].size // 2 for name in names})
    small = graph.shrink(params, choice.keep, verify=False)
    shares = {
        'share of parameters': choice.after.parameters / choice.before.parameters,
        'share of FLOPs': choice.after.flops / choice.before.flops,
    }
    whole_version = _Version(model.logits, params, batch)
    small_version = _Version(graph.small_apply(choice.keep), small, batch)
    rows = [_row(f'{title}: half of {_summary(names)}', shares)]
    for name, whole_program in whole_version.programs.items():
        calls = {'whole': whole_program, 'small': small_version.programs[name]}
        times = interleaved(calls, rounds, SECONDS)
        columns = {
            'times as fast': ratio(times['whole'], times['small']),
            'at least': case.at_least,
            'milliseconds': times['small'].milliseconds,
            'share of memory': small_version.bytes[name] / whole_version.bytes[name],
        }
        rows.append(_row(f'{title}: {name}', columns))
    return rows


def _names(graph: ChannelGraph, case: Case) -> list[str]:
    """The groups that are cut; whole layers of a scan stay."""
    names = []
    for group in graph.groups.values():
        is_named = any(fnmatch.fnmatch(group.name, glob) for glob in case.halved)
        if is_named and not group.is_depth:
            names.append(group.name)
    return names


def _summary(names: list[str]) -> str:
    """The groups, with a star for the numbers of blocks: `block_*/up/kernel[1] (4)`."""
    counts = Counter([re.sub(r'_\d+', '_*', name) for name in names])
    parts = [name if count == 1 else f'{name} ({count})' for name, count in counts.items()]
    return ', '.join(parts)


def _row_of_budget(title: str, case: Case, rounds: int) -> Row:
    """The least cut that meets the budget, and the ratio of the times of that model and of the whole one."""
    model = case.model
    params, inputs = jax.jit(model.init)(), model.batch().inputs
    graph = channel_groups(model.logits, params, inputs)
    leave = sorted(graph.groups.keys() - _names(graph, case))
    choice = graph.choose(params, f'latency={LATENCY_BUDGET}', leave=leave)
    before, after = choice.milliseconds
    small = graph.shrink(params, choice.keep, verify=False)
    small_apply = jax.jit(graph.small_apply(choice.keep))
    apply_fn = jax.jit(model.logits)
    calls = {
        'whole': lambda: apply_fn(params, inputs),
        'small': lambda: small_apply(small, inputs),
    }
    times = interleaved(calls, rounds, SECONDS)
    columns = {
        'times as fast': ratio(times['whole'], times['small']),
        'as predicted': before / after,
        'milliseconds': times['small'].milliseconds,
        'share of FLOPs': choice.after.flops / choice.before.flops,
    }
    return _row(f'{title}: inference by budget latency={LATENCY_BUDGET}', columns)
