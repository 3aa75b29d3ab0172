"""The exact selection in its simplest form: counting passes over thresholds, and ties by index.

Which are the k largest of n scores? A sort answers more than that: it puts all n in order, in about log2(n) rounds that
each move them through memory. A mask needs no order. It needs one number, the threshold that exactly k scores reach.

How many scores reach a threshold falls as the threshold rises. A pass that counts reads the scores once, in order, and
writes nothing. So try a threshold in the middle: where too many reach it, the one that is sought lies above, where too
few do, below. Floats of 32 bits can be halved 32 times at most. Usually a count is exactly k much sooner.

For the scores 5 1 3 3 2 and k = 2 the steps are, with the floats in between left out:

    threshold      1   2   3   5   above
    reaching it    5   4   3   1   0

Threshold 3: three scores reach it, one too many. Threshold 5: one score reaches it, one too few. No float between them
changes the count. So the two scores 3 are ties, and one of them is kept.

No threshold divides equal scores. Then all scores above the ties are kept, and of the ties the first in flat order, up
to k in all. So the mask is that of a stable sort, down to the last bit.

The other files take the same steps faster, and call them by the same words, but for k, which is `count` or `target`
there. Their float ranks are shifted, so that none is negative. `search.find_cut` takes the steps in this order:

1. `bracket`: two thresholds, `low` that at least k scores reach, and `high` that fewer do. (`brackets`)
2. `probes`: thresholds between them. On a CPU three are counted in one pass, and a sample of the scores tells where to
   begin; elsewhere fifteen, without a sample.
   (`search` for the first probes, `brackets` for the later ones, `counting` for the pass)
3. `settle`: replace `low` or `high` by the probes until the count at `low` is k, or no float lies between. (`brackets`)
4. `ties`: scores that reach `low` and not `high`. If the count at `low` is k, all of them are kept. Otherwise they are
   equal, and the first `ties_to_keep = k - count(high)` are kept, those before the `end` in flat order. (`masks`)

Order: NaN ranks lowest and is kept only where everything is. -0.0 equals 0.0.
"""

import numpy as np


def keep_largest_by_counting(scores: np.ndarray, k: int) -> np.ndarray:
    """Makes the uint8 mask of the `k` largest scores, in NumPy and one leaf at a time."""
    if k >= scores.size:
        return np.ones(scores.shape, np.uint8)
    low, high = settle(scores, k)
    above = scores >= value_at(high, scores.dtype)
    ties = (scores >= value_at(low, scores.dtype)) & ~above
    ties_to_keep = k - np.count_nonzero(above)
    is_before_end = np.cumsum(ties).reshape(scores.shape) <= ties_to_keep
    return (above | (ties & is_before_end)).astype(np.uint8)


def settle(scores: np.ndarray, k: int) -> tuple[int, int]:
    """Narrows the bracket of float ranks `low` and `high` by one probe a pass."""
    infinity = float_rank_of_infinity(scores.dtype)
    low, high = -infinity, infinity + 1
    while high - low > 1:
        probe = (low + high) // 2
        count = np.count_nonzero(scores >= value_at(probe, scores.dtype))
        if count >= k:
            low = probe
        else:
            high = probe
        if count == k:
            break
    return low, high


def float_rank_of_infinity(dtype: np.dtype) -> int:
    """Counts the floats from zero up to infinity: that many bit patterns lie between."""
    return int(np.array(np.inf, dtype).view(f'int{8 * dtype.itemsize}'))


def value_at(float_rank: int, dtype: np.dtype) -> np.ndarray:
    """Finds the float with this rank, which counts floats from zero; NaN one above infinity."""
    value = np.array(abs(float_rank)).astype(f'int{8 * dtype.itemsize}').view(dtype)
    return -value if float_rank < 0 else value
