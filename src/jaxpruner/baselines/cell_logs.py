"""What is written of a cell besides its result: metrics over time and some masks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner.files.atomic_files import replace_file

Masks = dict[str, np.ndarray]  # by leaf path
_SHOWN_KERNELS = 2  # whose masks are kept over time


def write_logs(
    out: Path,
    name: str,
    history: Sequence[dict[str, Any]],
    masks: Masks,
    tensorboard: bool = False,
) -> None:
    """Writes `metrics/<name>.jsonl`, `masks/<name>.npz` and, if asked, TensorBoard's events.

    `history` has `{'step': …, metric: value, …}` of each evaluation; `masks` maps leaf paths to
    uint8[1 + evaluations, …leaf shape], the first before the first step, and is empty when dense.
    """
    lines = [json.dumps(entry) + '\n' for entry in history]
    content = ''.join(lines).encode()
    path = out / 'metrics' / f'{name}.jsonl'
    replace_file(path, lambda temporary: temporary.write_bytes(content))
    if masks:
        steps = [0]
        for entry in history:
            steps.append(entry['step'])
        arrays = {'steps': np.asarray(steps, np.int64), **masks}
        path = out / 'masks' / f'{name}.npz'
        replace_file(path, lambda temporary: _write_npz(temporary, arrays))
    if tensorboard:
        _write_events(out / 'tensorboard' / name, history)


def with_snapshot(snapshots: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> Masks:
    """Adds the masks of this moment: of the first kernel, and of the largest other one.

    `snapshots` maps leaf paths to uint8[moments, cells, …leaf shape] and is empty at first; the
    arrays of `masks` have no axis of moments.
    """
    first, others = list(masks)[:1], list(masks)[1:]
    largest_first = sorted(others, key=lambda path: -masks[path].size)
    shown = (first + largest_first)[:_SHOWN_KERNELS]
    longer = {}
    for path in shown:
        now = masks[path][None]
        longer[path] = np.concatenate([snapshots[path], now]) if snapshots else now
    return longer


def _write_npz(path: Path, arrays: Masks) -> None:
    with path.open('wb') as file:  # a name alone would get another ending
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _write_events(folder: Path, history: Sequence[dict[str, Any]]) -> None:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for entry in history:
            for key in entry.keys() - {'step'}:
                writer.add_scalar(key, entry[key], entry['step'])
