"""What the contract promises of parameters and optimizer state, each as one assertion about a trained case."""

import itertools

import numpy as np

import jaxpruner
from contract import expected, tables, training


def stored_masks(params, opt_state):
    """The masks in an optimizer state as 0 and 1 in the parameters' shapes, by the parameters' paths."""
    (state,) = jaxpruner.sparse_states(opt_state)
    return training.by_path(jaxpruner.unpack_masks(state.masks, params))


def check_zeros(case, params, opt_state):
    """Weights whose mask is 0 are exactly zero; straight-through methods train them on."""
    if tables.ALGORITHMS[case.algorithm].straight_through:
        return
    values = training.by_path(params)
    for path, mask in stored_masks(params, opt_state).items():
        assert not values[path][mask == 0].any(), path


def check_storage(case, params, opt_state):
    """Masks take one bit for each weight if packed, of one axis padded to bytes, else a byte."""
    (state,) = jaxpruner.sparse_states(opt_state)
    weights = training.by_path(params)
    for path, mask in training.by_path(state.masks).items():
        assert mask.dtype == np.uint8
        assert mask.ndim == weights[path].ndim
        if case.packed:
            assert weights[path].size / 8 <= mask.size < weights[path].size / 4
        else:
            assert mask.shape == weights[path].shape


def check_counts(case, updater, params, opt_state):
    """Exactly the asked number of weights (blocks, channels, N in each group) is left."""
    rules, sparsities = tables.ALGORITHMS[case.algorithm], expected_sparsities(case, params)
    if rules.straight_through:
        used = training.by_path(updater.pre_forward_update(params, opt_state))
        masks = {path: used[path] != 0 for path in sparsities}
        assert all(leaf.all() for leaf in training.by_path(params).values()), (
            'the trained weights stay dense'
        )
    else:
        used, masks = training.by_path(params), stored_masks(params, opt_state)
    if rules.joint:
        expected.check_joint_masks(masks, sparsities)
    else:
        expected.check_masks(masks, case.sparsity_type, sparsities)
    for path, leaf in used.items():
        kept = masks[path].sum() if path in masks else leaf.size
        # A regrown weight stays at zero as long as its gradient is zero.
        assert np.count_nonzero(leaf) == kept or (
            rules.regrows and np.count_nonzero(leaf) < kept
        ), path


def expected_sparsities(case, params):
    """The target of each leaf that is to be pruned."""
    if case.algorithm == 'no_prune':
        return {}
    prunes = tables.OPTIMIZERS[case.optimizer].prunes
    shapes = {path: leaf.shape for path, leaf in training.by_path(params).items() if prunes(leaf)}
    # One ranking of all leaves has one sparsity: there is nothing to distribute.
    distribution = 'uniform' if tables.ALGORITHMS[case.algorithm].joint else case.distribution
    return expected.targets(shapes, distribution, training.SPARSITY)


def check_regrowth(case, history):
    """Weights are regrown, at zero and with zeroed moments, in whatever the optimizer keeps in a parameter's shape."""
    total = 0
    for before, after in itertools.pairwise(history):
        was, now = stored_masks(*before), stored_masks(*after)
        values = training.by_path(after[0])
        (state,) = jaxpruner.sparse_states(after[1])
        moments = training.by_path(state.inner_state)
        for path in was:
            grown = (was[path] == 0) & (now[path] != 0)
            own = [
                leaf
                for name, leaf in moments.items()
                if name.endswith(path) and leaf.shape == grown.shape
            ]
            assert not any(leaf[grown].any() for leaf in (values[path], *own)), path
            total += grown.sum()
    assert bool(total) == tables.ALGORITHMS[case.algorithm].regrows
