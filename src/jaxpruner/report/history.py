"""What becomes of masks while a model trains: counts that a training loop records, and plots of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.report import figures
from jaxpruner.report.figures import COLORS, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MaskCounts(NamedTuple):
    """How many weights masks kept: [n] records of [m] masked leaves.

    >>> MaskCounts(np.array([1]), ('w',), np.array([4]), np.array([[0.5]]), np.array([[2]])).sparsity
    array([[0.5]])
    """

    steps: np.ndarray  # int64[n]
    leaves: tuple[str, ...]  # [m], such as 'dense/kernel'
    weights: np.ndarray  # int64[m]
    targets: np.ndarray  # float64[n, m]: sparsities that the pruner is to reach
    kept: np.ndarray  # int64[n, m]

    @property
    def sparsity(self) -> np.ndarray:
        """The share of each leaf that is pruned, float64[n, m]."""
        return 1 - self.kept / np.maximum(self.weights, 1)

    @property
    def total_sparsity(self) -> np.ndarray:
        """The share of all leaves together that is pruned, float64[n]."""
        return 1 - self.kept.sum(1) / max(self.weights.sum(), 1)


class MaskHistory:
    """Records what becomes of masks, for the plots of `jaxpruner.report`: two lines in any training loop.

    `record` stands between two steps, outside of `jit`. It counts on the device and waits for nothing, so that a loop
    does not stall. Masks may be packed, and sharded over devices and processes: counts alone leave the devices.

    >>> import optax, jaxpruner
    >>> pruner = jaxpruner.MagnitudePruning(scheduler=jaxpruner.PolynomialSchedule(1, 0, 2), sparsity=0.75)
    >>> tx, params = pruner.wrap_optax(optax.sgd(0.1)), {'w': jnp.arange(1.0, 17).reshape(4, 4)}
    >>> opt_state = tx.init(params)
    >>> history = MaskHistory()  # line 1
    >>> for step in range(3):
    ...     updates, opt_state = tx.update(params, opt_state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     history.record(opt_state)  # line 2
    >>> history.counts.steps, history.counts.sparsity[:, 0]
    (array([1, 2, 3]), array([0.625, 0.75 , 0.75 ]))
    """

    def __init__(self) -> None:
        self._weights: dict[str, int] = {}  # by leaf
        self._records: list[Any] = []  # what `_count` returned, on the device or fetched

    def record(self, opt_state: Any, step: int | None = None) -> None:
        """Records the masks of an optimizer state.

        Args:
          opt_state: any optimizer state, such as `optimizer.opt_state` of Flax NNX; of states stacked by `vmap` the
            sums over all models are recorded.
          step: the step to record them under; by default the number of steps that are over, as the pruner counts them:
            1 after the schedule's step 0.

        Raises:
          TypeError: it was called inside of a compiled program.
          ValueError: there is no `SparseState` with masks, or its leaves are not those recorded before.
        """
        sizes: dict[str, Any] = {}
        masks, targets = [], []
        states = sparse_state_lib.sparse_states(opt_state)
        for state in states:
            of_leaves = state.sizes, sparse_state_lib.leaf_targets(state)
            for path, mask, size, target in tree_lib.zip_with_paths(state.masks, *of_leaves):
                name = tree_lib.path_string(path)
                name = f'{name} (another pruner)' if name in sizes else name
                sizes[name] = np.size(mask) if size is None else size
                masks.append(jnp.asarray(mask))
                targets.append(np.nan if target is None else target)
        if not masks:
            raise ValueError(f'no leaf is masked, or {sparse_state_lib.NO_STATE}')
        if tree_lib.has_traced(masks):
            raise TypeError(
                'MaskHistory.record was called inside of a compiled program (jit, scan, vmap): call it between steps '
                'with the optimizer state that a step returned'
            )
        if not self._weights:
            self._weights = {name: int(np.sum(jax.device_get(sizes[name]))) for name in sizes}
        if sizes.keys() != self._weights.keys():
            names = sorted(sizes.keys() ^ self._weights.keys())
            raise ValueError(f'{names} are in one record alone; make a MaskHistory for each model')
        if step is None:
            step = len(self._records) if states[0].count is None else states[0].count
        self._records.append(_count(step, targets, masks))

    @property
    def counts(self) -> MaskCounts:
        """All that was recorded; waits for the last step. Raises ValueError where nothing was."""
        if not self._records:
            raise ValueError('nothing was recorded: call record(opt_state) after steps')
        self._records = jax.device_get(self._records)
        steps, targets, kept = map(np.array, zip(*self._records, strict=True))
        weights = np.array(list(self._weights.values()), np.int64)
        columns = weights, targets.astype(float), kept.astype(np.int64)
        return MaskCounts(steps.astype(np.int64), tuple(self._weights), *columns)


@jax.jit
def _count(
    step: Any, targets: list[Any], masks: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns arrays that lie in no memory which the next step may donate."""
    means = [jnp.mean(target, dtype=jnp.float32) for target in targets]
    kept = [sparse_state_lib.kept_weights(mask) for mask in masks]
    return jnp.stack([jnp.max(step)])[0], jnp.stack(means), jnp.stack(kept)


def plot_schedule(
    history: MaskHistory, path: Path | str | None = None, *, scheduler: Any = None
) -> 'Figure':
    """Draws how sparse the masks were over the steps: all leaves together, and each leaf as a pale line.

    Args:
      history: what the training loop recorded.
      path: the image to write, .png, .pdf or .svg; `None` writes none.
      scheduler: the pruner's schedule, drawn beside what became of it.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: nothing was recorded, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import optax, jaxpruner
    >>> tx = jaxpruner.StaticRandomSparse(sparsity=0.75).wrap_optax(optax.sgd(0.1))
    >>> history = MaskHistory()
    >>> history.record(tx.init({'w': jnp.ones((4, 4))}))
    >>> plot_schedule(history).axes[0].get_ylabel()
    'pruned weights (%)'
    """
    figures.check_ending(path)
    counts = history.counts
    figure = figures.new_figure(6.4, 3.6)
    axes = figure.subplots()
    pale = {'where': 'post', 'color': '#b9c0ca', 'lw': 0.9, 'zorder': 1}
    axes.step(counts.steps, 100 * counts.sparsity, **pale)[0].set_label('single layers')
    total = {'where': 'post', 'color': COLORS[0], 'lw': 2, 'label': 'all layers together'}
    axes.step(counts.steps, 100 * counts.total_sparsity, **total)
    target = counts.targets[-1] @ counts.weights / max(counts.weights.sum(), 1)
    axes.axhline(100 * target, color=INK, ls='--', lw=1, label='target', zorder=0)
    if scheduler is not None:
        steps = np.unique(np.linspace(counts.steps[0], counts.steps[-1], 400).astype(int))
        # The counter stands at 1 after step 0.
        asked = [scheduler.get_sparsity_at_step(target, step - 1) for step in steps.tolist()]
        percents = 100 * np.array(asked, float)
        axes.plot(steps, percents, color=COLORS[1], ls=':', lw=2, label='schedule')
    axes.set_xlabel('step')
    axes.set_ylabel('pruned weights (%)')
    axes.set_ylim(-2, 102)
    figures.clean(axes, 'y')
    figure.legend(loc='outside upper left', ncols=4, frameon=False)
    return figures.save(figure, path)


def plot_layers(history: MaskHistory, path: Path | str | None = None) -> 'Figure':
    """Draws the sparsity of each leaf at the last record as bars, with its target and the number of weights kept.

    Args:
      history: what the training loop recorded.
      path: the image to write, .png, .pdf or .svg; `None` writes none.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: nothing was recorded, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import optax, jaxpruner
    >>> tx = jaxpruner.StaticRandomSparse(sparsity=0.75).wrap_optax(optax.sgd(0.1))
    >>> history = MaskHistory()
    >>> history.record(tx.init({'w': jnp.ones((4, 4))}))
    >>> [label.get_text() for label in plot_layers(history).axes[0].get_yticklabels()]
    ['w']
    """
    figures.check_ending(path)
    counts = history.counts
    longest = max(map(len, counts.leaves))
    figure = figures.new_figure(0.072 * longest + 6, 0.26 * len(counts.leaves) + 1.2)
    axes = figure.subplots()
    figures.draw_layers(axes, counts.leaves, counts.sparsity[-1], counts.targets[-1])
    for row, (kept, weights) in enumerate(zip(counts.kept[-1], counts.weights, strict=True)):
        place = {'xycoords': ('axes fraction', 'data'), 'va': 'center', 'fontsize': 8}
        axes.annotate(f'{kept:,} of {weights:,} kept', (1.01, row), **place)
    axes.set_xlabel('pruned weights (%)')
    title = f'step {counts.steps[-1]:,}: {100 * counts.total_sparsity[-1]:.1f}% pruned'
    axes.set_title(title, loc='left', fontsize=11, color=INK)
    figure.legend(loc='outside upper right', frameon=False)
    return figures.save(figure, path)
