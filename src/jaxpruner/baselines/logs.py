"""What is written of a cell besides its result: metrics over time, as JSON lines and for TensorBoard, and masks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner.core.atomic_files import replace_file

_SHOWN_KERNELS = 2  # whose masks are kept over time


def write_logs(
    out: Path,
    name: str,
    history: Sequence[dict[str, Any]],
    masks: dict[str, np.ndarray],
    tensorboard: bool = False,
) -> None:
    """Writes `metrics/<name>.jsonl`, `masks/<name>.npz` and, if asked, TensorBoard's events, over older ones.

    Args:
      out: the folder of results.
      name: of the cell.
      history: of each evaluation `{'step': …, name: value, …}`.
      masks: leaf path -> uint8[1 + evaluations, …leaf shape], the first before the first step; none for a dense model.
      tensorboard: also write `tensorboard/<name>/`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_logs(Path(folder), 'set_0.8_0', [{'step': 5, 'loss': 0.5}], {})
    ...     print(Path(folder, 'metrics', 'set_0.8_0.jsonl').read_text(), end='')
    {"step": 5, "loss": 0.5}
    """
    lines = ''.join(json.dumps(entry) + '\n' for entry in history).encode()
    replace_file(out / 'metrics' / f'{name}.jsonl', lambda temporary: temporary.write_bytes(lines))
    if masks:
        steps = np.asarray([0, *(entry['step'] for entry in history)], np.int64)
        replace_file(
            out / 'masks' / f'{name}.npz',
            lambda temporary: _write_npz(temporary, {'steps': steps, **masks}),
        )
    if tensorboard:
        from tensorboardX import SummaryWriter

        with SummaryWriter(str(out / 'tensorboard' / name)) as writer:
            for entry in history:
                for key in entry.keys() - {'step'}:
                    writer.add_scalar(key, entry[key], entry['step'])


def with_snapshot(
    snapshots: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Adds the masks of this moment: of the first kernel, and of the largest other one.

    Args:
      snapshots: leaf path -> uint8[moments, cells, …leaf shape]; empty at first.
      masks: leaf path -> uint8[cells, …leaf shape].

    Returns:
      As `snapshots`, one moment longer.

    >>> with_snapshot({}, {'kernel': np.array([[1, 0]], np.uint8)})
    {'kernel': array([[[1, 0]]], dtype=uint8)}
    """
    first, others = list(masks)[:1], list(masks)[1:]
    shown = [*first, *sorted(others, key=lambda path: -masks[path].size)][:_SHOWN_KERNELS]
    return {
        path: np.concatenate([snapshots[path], masks[path][None]])
        if snapshots
        else masks[path][None]
        for path in shown
    }


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open('wb') as file:  # a name alone would get another ending
        np.savez_compressed(file, allow_pickle=False, **arrays)
