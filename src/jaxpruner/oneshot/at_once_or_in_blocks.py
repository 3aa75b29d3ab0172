"""Takes the statistics of a model and prunes it: all leaves at once, or one block after another."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.blocks import Names
from jaxpruner.oneshot.calibration import CalibratedMatrices, calibrate
from jaxpruner.oneshot.owl_blocks import OwlSettings, matrix_sparsities
from jaxpruner.oneshot.pruning_run import PruningRun
from jaxpruner.oneshot.sample_weights import SampleWeights
from jaxpruner.oneshot.sequential import SequentialCalibration
from jaxpruner.progress import progress_bar


def prune_at_once(
    run: PruningRun,
    calibration: Mapping[tree_lib.Path, Iterable[CalibratedMatrices]],
    owl: OwlSettings | None,
    owns_statistics: bool,
) -> None:
    """Prunes all leaves by statistics of the dense model.

    With `owns_statistics` nothing else holds them: they are freed one after another.

    Raises:
      ValueError: statistics do not fit, or are not finite.
    """
    entries = _entries(calibration, run.targets)
    del calibration
    run.check(entries)
    if owl is not None:
        _choose_sparsities(run, entries, owl)
    run.prune(entries, owns_statistics)
    run.warn()


def prune_in_blocks(
    run: PruningRun,
    apply_fn: Callable[..., Any],
    batches: list[Any],
    *,
    blocks: Sequence[Names] | None,
    owl: OwlSettings | None,
    progress: bool,
    weights: SampleWeights | None,
) -> None:
    """Prunes each block by statistics of the model in which those before it are pruned.

    Raises:
      ValueError: as in `prune_at_once`, or blocks have no order.
    """
    only = list(run.targets)
    kind = run.pruner.kind
    calibration = SequentialCalibration(
        apply_fn, run.leaves.params, batches, kind, only=only, blocks=blocks, weights=weights
    )
    if owl is not None:
        dense = calibrate(
            apply_fn, run.leaves.params, batches, only=only, progress=progress, weights=weights
        )
        _choose_sparsities(run, _entries(dense, dense), owl)
        del dense
    number_of_takes = len(calibration.blocks) * len(batches)
    del batches  # `calibration` now holds the batches; free ours
    done = itertools.count(1)
    with progress_bar(number_of_takes, progress) as show:
        for number in range(len(calibration.blocks)):
            name = f'block {number + 1} of {len(calibration.blocks)}'

            def on_batch(totals: Any, name: str = name) -> None:
                show(name, next(done), totals)

            entries = calibration.take(number, run.leaves.params, on_batch)
            run.check(entries)
            run.prune(entries, owns_statistics=True)
    run.warn()


def _entries(
    calibration: Mapping[tree_lib.Path, Iterable[CalibratedMatrices]],
    paths: Iterable[tree_lib.Path],
) -> list[CalibratedMatrices]:
    return [entry for path in paths for entry in calibration[path]]


def _choose_sparsities(
    run: PruningRun, entries: Sequence[CalibratedMatrices], owl: OwlSettings
) -> None:
    """Gives each matrix of the run the sparsity that OWL chooses."""
    if not entries:
        return
    sparsities = matrix_sparsities(entries, run.targets, run.leaves.read, owl)
    for (matrices, _), sparsity in zip(entries, sparsities, strict=True):
        run.sparsities[matrices.path, matrices.reading] = sparsity
