"""What becomes of masks while a model trains: counts that a training loop records between its steps."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax

    from jaxpruner.report.stored_masks import MaskedLeaf, Record

_MOST_ON_DEVICE = 512  # records, after which all but the newest are fetched


class MaskCounts(NamedTuple):
    """How many weights masks kept, dropped and regrew: [n] records of [m] masked leaves.

    >>> MaskCounts(np.array([1]), ('w',), np.array([4]), np.array([[0.5]]), *3 * [np.array([[2]])]).sparsity
    array([[0.5]])
    """

    steps: np.ndarray  # int64[n]
    leaves: tuple[str, ...]  # [m], such as 'dense/kernel'
    weights: np.ndarray  # int64[m]
    targets: np.ndarray  # float64[n, m]: sparsities that the pruner is to reach
    kept: np.ndarray  # int64[n, m]
    dropped: np.ndarray  # int64[n, m]: kept in the record before, and not in this one
    regrown: np.ndarray  # int64[n, m]: kept in this record, and not in the one before

    @property
    def sparsity(self) -> np.ndarray:
        """The share of each leaf that is pruned, float64[n, m]."""
        return 1 - self.kept / np.maximum(self.weights, 1)

    def select(self, leaves: Any) -> 'MaskCounts':
        """Returns the counts of the leaves that a name or glob (or several) means; ValueError if one means none."""
        from jaxpruner.report import stored_masks

        chosen = stored_masks.chosen_names(self.leaves, leaves)
        return MaskCounts(
            steps=self.steps,
            leaves=tuple(self.leaves[number] for number in chosen),
            weights=self.weights[chosen],
            targets=self.targets[:, chosen],
            kept=self.kept[:, chosen],
            dropped=self.dropped[:, chosen],
            regrown=self.regrown[:, chosen],
        )


class MaskHistory:
    """Records what becomes of masks, for the plots of `jaxpruner.report`: two lines in any training loop.

    `record` stands between two steps, outside of `jit`. It counts on the device and waits for nothing, so that a loop
    does not stall. Masks may be packed, and sharded over devices and processes: counts alone leave the devices. A copy
    of the masks, of one bit per weight, stays on the device to be compared with the next ones.

    >>> import jax.numpy as jnp, optax, jaxpruner
    >>> pruner = jaxpruner.MagnitudePruning(scheduler=jaxpruner.PolynomialSchedule(1, 0, 2), sparsity=0.75)
    >>> tx, params = pruner.wrap_optax(optax.sgd(0.1)), {'w': jnp.arange(1.0, 17).reshape(4, 4)}
    >>> opt_state = tx.init(params)
    >>> history = MaskHistory()  # line 1
    >>> for step in range(3):
    ...     updates, opt_state = tx.update(params, opt_state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     history.record(opt_state)  # line 2
    >>> counts = history.counts
    >>> counts.steps, counts.sparsity[:, 0], counts.dropped[:, 0]
    (array([1, 2, 3]), array([0.625, 0.75 , 0.75 ]), array([0, 2, 0]))
    """

    def __init__(self) -> None:
        self._leaves: dict[str, int] = {}  # names and weights
        self._shapes: list[tuple[int, ...]] = []
        self._masks: list[jax.Array] | None = None  # of the last record
        self._records: list[Record] = []  # those from _fetched on are still on the device
        self._fetched = 0

    def __len__(self) -> int:
        """Counts the records."""
        return len(self._records)

    def record(self, opt_state: Any, step: int | None = None) -> None:
        """Records the masks of an optimizer state.

        Args:
          opt_state: any optimizer state, such as `optimizer.opt_state` of Flax NNX; of states stacked by `vmap` the
            sums over all models are recorded.
          step: the step to record them under; by default the number of steps that are over, as the pruner counts them:
            1 after the schedule's step 0.

        Raises:
          TypeError: it was called inside of a compiled program.
          ValueError: there is no `SparseState`, nothing in it is masked, or its leaves are not those recorded before.
        """
        from jaxpruner.report import stored_masks

        leaves = stored_masks.masked_leaves(opt_state)
        self._check_leaves(leaves)
        if step is None:
            step = stored_masks.steps_counted(opt_state)
        step = len(self) if step is None else step
        self._masks, record = stored_masks.count(leaves, self._masks, step)
        self._records.append(record)
        if len(self._records) - self._fetched > _MOST_ON_DEVICE:
            self._fetch(len(self._records) - 1)

    @property
    def counts(self) -> MaskCounts:
        """All that was recorded; waits for the last step. Raises ValueError where nothing was."""
        if not self._records:
            raise ValueError(
                'nothing was recorded: call record(opt_state) after steps of the training loop'
            )
        self._fetch(len(self._records))
        steps, targets, counts = map(np.array, zip(*self._records, strict=True))
        kept, dropped, regrown = np.moveaxis(counts.astype(np.int64), 1, 0)
        weights = list(self._leaves.values())
        return MaskCounts(
            steps=steps[:, 0].astype(np.int64),
            leaves=tuple(self._leaves),
            weights=np.array(weights, np.int64),
            targets=targets.astype(float),
            kept=kept,
            dropped=dropped,
            regrown=regrown,
        )

    def _fetch(self, end: int) -> None:
        from jaxpruner.report import stored_masks

        new = slice(self._fetched, end)
        self._records[new] = stored_masks.fetch(self._records[new])
        self._fetched = end

    def _check_leaves(self, leaves: list['MaskedLeaf']) -> None:
        from jaxpruner.report import stored_masks

        named = {leaf.name: leaf for leaf in leaves}
        shapes = [leaf.mask.shape for leaf in leaves]
        if self._masks is None:
            self._shapes = shapes
            for name, leaf in named.items():
                self._leaves[name] = stored_masks.number_of_weights(leaf)
        elif list(named) != list(self._leaves) or shapes != self._shapes:
            before = set(zip(self._leaves, self._shapes, strict=True))
            now = set(zip(named, shapes, strict=True))
            name, shape = min(before ^ now or before)
            raise ValueError(
                f'the masks are not those recorded before, of {len(before)} leaves: {name} of shape {shape} is in '
                'one of them alone; make a MaskHistory for each model'
            )
