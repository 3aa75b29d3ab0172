"""What becomes of masks while a model trains: counts that a training loop records between its steps."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import explicit_meshes, packing, sparse_state
from jaxpruner.core import tree as tree_lib

_MOST_ON_DEVICE = 512  # records, after which all but the newest are fetched


class MaskCounts(NamedTuple):
    """How many weights masks kept, dropped and brought back: [n] records of [m] masked leaves.

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
        names = [tree_lib.rule_name(name) for name in tree_lib.as_names(leaves)]
        paths = [tuple(leaf.split('/')) for leaf in self.leaves]
        tree_lib.check_names(names, paths, 'leaves')
        chosen = [i for i, path in enumerate(paths) if tree_lib.matches_any(names, path)]
        return MaskCounts(
            self.steps,
            tuple(self.leaves[i] for i in chosen),
            self.weights[chosen],
            *(counts[:, chosen] for counts in self[3:]),
        )


class MaskHistory:
    """Records what becomes of masks, for the plots of `jaxpruner.report`: two lines in any training loop.

    `record` stands between two steps, outside of `jit`. It counts on the device and waits for nothing, so that a loop
    does not stall. Masks may be packed, and sharded over devices and processes: counts alone leave the devices. A copy
    of the masks, of one bit per weight, stays on the device to be compared with the next ones.

    >>> import optax, jaxpruner
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
        self._records: list[_Record] = []  # those from _fetched on are still on the device
        self._fetched = 0

    def __len__(self) -> int:
        """How often was recorded."""
        return len(self._records)

    def record(self, opt_state: Any, step: int | None = None) -> None:
        """Records the masks of an optimizer state.

        Args:
          opt_state: any optimizer state; of states stacked by `vmap` the sums over all models are recorded.
          step: the step to record them under; by default the steps that the pruner has counted.

        Raises:
          TypeError: it was called inside of a compiled program.
          ValueError: there is no `SparseState`, nothing in it is masked, or its leaves are not those recorded before.
        """
        states = sparse_state.sparse_states(opt_state)
        if not states:
            raise ValueError(sparse_state.NO_STATE)
        leaves = [leaf for state in states for leaf in _masked_leaves(state)]
        if any(map(tree_lib.is_traced, jax.tree.leaves(leaves))):
            raise TypeError(
                'MaskHistory.record was called inside of a compiled program (jit, scan, vmap): call it between steps '
                'with the optimizer state that a step returned'
            )
        self._check_leaves(leaves)
        masks = [leaf.mask for leaf in leaves]
        axes = tuple(_packing_axis(leaf) for leaf in leaves)
        targets = [leaf.target for leaf in leaves]
        count = states[0].count if step is None else step
        count = len(self) if count is None else count
        self._masks, record = _count(masks, self._masks, (count, targets), axes)
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
        steps, targets, counts = (np.array(column) for column in zip(*self._records, strict=True))
        return MaskCounts(
            steps[:, 0].astype(np.int64),
            tuple(self._leaves),
            np.array(list(self._leaves.values()), np.int64),
            targets.astype(float),
            *np.moveaxis(counts.astype(np.int64), 1, 0),
        )

    def _fetch(self, end: int) -> None:
        self._records[self._fetched : end] = jax.device_get(self._records[self._fetched : end])
        self._fetched = end

    def _check_leaves(self, leaves: list['_MaskedLeaf']) -> None:
        if not leaves:
            raise ValueError('no leaf of the optimizer state is masked: there is nothing to record')
        named = {leaf.name: leaf for leaf in leaves}
        shapes = [leaf.mask.shape for leaf in leaves]
        if self._masks is None:
            self._shapes = shapes
            for name, leaf in named.items():
                size = leaf.mask.size if leaf.size is None else np.sum(jax.device_get(leaf.size))
                self._leaves[name] = int(size)
        elif list(named) != list(self._leaves) or shapes != self._shapes:
            before = dict(zip(self._leaves, self._shapes, strict=True))
            now = dict(zip(named, shapes, strict=True))
            odd = next(iter({*before.items()} ^ {*now.items()}))
            raise ValueError(
                f'the masks are not those recorded before, of {len(before)} leaves: {odd[0]} of shape {odd[1]} is in '
                f'one of them alone; make a MaskHistory for each model'
            )


# The step [1], the targets [m], and what masks kept, dropped and brought back, uint32[3, m].
_Record = tuple[jax.Array, jax.Array, jax.Array]


class _MaskedLeaf(NamedTuple):
    """The mask of a leaf as a state stores it."""

    name: str
    mask: jax.Array
    size: Any  # weights if the mask is packed, else None
    target: Any


def _masked_leaves(state: sparse_state.SparseState) -> list[_MaskedLeaf]:
    paths, masks, treedef = tree_lib.flatten_with_paths(state.masks)
    targets = tree_lib.leaves_like(treedef, sparse_state.leaf_targets(state))
    sizes = tree_lib.leaves_like(treedef, state.sizes)
    leaves = []
    for path, mask, size, target in zip(paths, masks, sizes, targets, strict=True):
        target = np.nan if target is None else target
        leaves.append(_MaskedLeaf(tree_lib.path_string(path), jnp.asarray(mask), size, target))
    return leaves


def _packing_axis(leaf: _MaskedLeaf) -> int | None:
    """The axis along which the copy of a mask is packed; `None` if it is held as it is."""
    mask = leaf.mask
    if leaf.size is not None or not mask.ndim or explicit_meshes.has_explicit_axes(mask):
        return None
    return packing.packed_axis(mask.shape, mask.sharding.shard_shape(mask.shape))


@partial(jax.jit, static_argnums=3)
def _count(
    masks: list[jax.Array],
    before: list[jax.Array] | None,
    others: tuple[Any, list[Any]],
    axes: tuple[int | None, ...],
) -> tuple[list[jax.Array], _Record]:
    """Copies of the masks, and the record of them: nothing of it lies in memory that the next step may donate."""
    copies = []
    for mask, axis in zip(masks, axes, strict=True):
        copies.append(_copied(mask) if axis is None else packing.pack(mask, axis))
    counts = []
    for new, old in zip(copies, before or copies, strict=True):
        kept = packing.kept_weights(new)
        counts.append((kept, packing.kept_weights(old & ~new), packing.kept_weights(new & ~old)))
    count, targets = others
    means = [jnp.mean(target, dtype=jnp.float32) for target in targets]
    return copies, (jnp.array([jnp.max(count)]), jnp.array(means), jnp.array(counts).T)


def _copied(mask: jax.Array) -> jax.Array:
    """The mask in memory of its own: `jit` hands back an argument as it is, which the next step may donate."""
    return mask | jnp.uint8(0)
