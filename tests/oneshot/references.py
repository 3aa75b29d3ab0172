"""The papers' equations in NumPy and float64, one weight at a time where that is plainest."""

import numpy as np


def keep_best(scores, count):
    """A mask of the `count` largest; of equal ones the first in flat order."""
    mask = np.zeros(scores.size, bool)
    mask[np.argsort(-scores.ravel(), kind='stable')[:count]] = True
    return mask.reshape(scores.shape)


def number_kept(size, sparsity):
    return max(1, int(np.round(np.float32(size) * (np.float32(1) - np.float32(sparsity)))))


def keep_n_of_m(scores, n, m):
    """Along the first axis; of equal ones the last."""
    mask = np.zeros(scores.shape, bool)
    for start in range(0, scores.shape[0], m):
        for column in range(scores.shape[1]):
            group = scores[start : start + m, column]
            best = sorted(range(len(group)), key=lambda i: (group[i], i))[-n:]
            mask[[start + i for i in best], column] = True
    return mask


def mask_of(scores, sparsity, n_by_m=None, per='output'):
    if n_by_m:
        return keep_n_of_m(scores, *n_by_m)
    if per == 'layer':
        return keep_best(scores, number_kept(scores.size, sparsity))
    count = number_kept(scores.shape[0], sparsity)
    return np.stack([keep_best(column, count) for column in scores.T], 1)


def wanda(weights, inputs):
    return np.abs(weights) * np.linalg.norm(inputs, axis=0)[:, None]


def ria(weights, inputs, power=0.5):
    sizes = np.abs(weights)
    importance = sizes / sizes.sum(0, keepdims=True) + sizes / sizes.sum(1, keepdims=True)
    return importance * np.linalg.norm(inputs, axis=0)[:, None] ** power


def owl(blocks, sparsity, multiple, deviation):
    """The sparsity of each block `[(weights, inputs), …]`, of blocks of one size: as the published code has it."""
    shares = []
    for matrices in blocks:
        scores = [np.abs(weights) * np.sqrt((x**2).mean(0))[:, None] for weights, x in matrices]
        flat = np.concatenate([score.ravel() for score in scores])
        shares.append((flat > multiple * flat.mean()).mean())
    shares = np.array(shares)
    kept = (shares - shares.min()) * (1 / (shares.max() - shares.min()) * deviation * 2)
    return 1 - (kept - kept.mean() + (1 - sparsity))


def sparsegpt(weights, inputs, sparsity, n_by_m=None, per='layer', keep_zeros=False, block=128):
    """One input after another, each error told to all later inputs at once."""
    weights = weights.astype(np.float64).copy()
    alive = (weights != 0) | (not keep_zeros)
    hessian = inputs.astype(np.float64).T @ inputs
    size = len(weights)
    dead = np.diag(hessian) == 0
    mean = np.diag(hessian)[~dead].mean()
    hessian[dead, dead] = mean
    hessian += 0.01 * mean * np.eye(size)
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    diagonal = np.where(dead, np.inf, np.diag(upper))[:, None]  # their weights cost nothing
    mask = np.ones(weights.shape, bool)
    kept = 0
    for start in range(0, size, block):
        rows = slice(start, min(start + block, size))
        if not n_by_m:
            unit = weights.shape[1] if per == 'layer' else 1
            count = number_kept(rows.stop * unit, sparsity) - kept
            kept += count
            costs = np.where(alive[rows], weights[rows] ** 2 / diagonal[rows] ** 2, -1)
            if per == 'layer':
                mask[rows] = keep_best(costs, count)
            else:
                mask[rows] = np.stack([keep_best(column, count) for column in costs.T], 1)
            mask[rows] &= alive[rows]
        for i in range(rows.start, rows.stop):
            if n_by_m and i % n_by_m[1] == 0:
                group = slice(i, i + n_by_m[1])
                costs = np.where(alive[group], weights[group] ** 2 / diagonal[group] ** 2, -1)
                mask[group] = keep_n_of_m(costs, *n_by_m) & alive[group]
            error = np.where(mask[i], 0, weights[i]) / upper[i, i]
            weights[i:] -= np.outer(upper[i, i:], error)
            weights[i] = np.where(mask[i], weights[i], 0)
    return weights, mask
