"""Weight matrices whose statistics are known: in which order they are pruned, and how much of each at once."""

import collections
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.weight_matrices import WeightMatrices


class Job(NamedTuple):
    """Weight matrices that are ready to be pruned.

    Attributes:
      path: of their leaf.
      matrices: how they are read from it.
      statistics: of their inputs, or what a pruner has prepared of them.
      sparsity: a scalar, or one for each of them.
      layer: which layer of a stack they are, `None` for all or where there is no stack.
      prepared: whether the statistics are.

    >>> Job(('w',), None, InputStatistics(2, jnp.ones(3)), 0.5).layer is None
    True
    """

    path: tree_lib.Path
    matrices: WeightMatrices
    statistics: Any
    sparsity: Any
    layer: int | None = None
    prepared: bool = False


def take_job(jobs: list[Job], prepare: Callable[[InputStatistics], Any] | None = None) -> Job:
    """Takes the job that makes most room: it takes the memory of a leaf and its mask, and frees statistics.

    Args:
      jobs: at least one; it is taken from the list.
      prepare: what a pruner makes of statistics, once for all jobs that share them; `None` leaves them as they are.

    >>> from jaxpruner.oneshot.calibration import calibrate
    >>> params = {'few': jnp.ones((2, 8)), 'many': jnp.ones((8, 2))}
    >>> found = calibrate(lambda p, x: x @ p['few'] @ p['many'], params, [jnp.ones((3, 2))], 'gram')
    >>> jobs = [Job(path, *found[path][0], 0.5) for path in found]
    >>> take_job(jobs, lambda statistics: statistics.gram).path, len(jobs)
    (('many',), 1)
    """
    users = collections.Counter(id(job.statistics) for job in jobs)

    def room(number: int) -> float:
        job = jobs[number]
        freed = sum(
            leaf.nbytes for leaf in jax.tree.leaves(job.statistics) if hasattr(leaf, 'nbytes')
        )
        return freed / users[id(job.statistics)] - 5 * math.prod(job.matrices.layout.shape)

    taken = max(range(len(jobs)), key=room)
    if prepare is not None and not jobs[taken].prepared:
        given = jobs[taken].statistics
        prepared = prepare(given)
        jobs[:] = [
            job._replace(statistics=prepared, prepared=True) if job.statistics is given else job
            for job in jobs
        ]
    return jobs.pop(taken)


def one_by_one(job: Job, found: PrunedLeaves) -> Iterator[Job]:
    """The layers of a stack one after another, so that only one's new weights lie beside the old ones.

    Args:
      job: whose statistics live until the last layer is asked for, if nothing else holds them.
      found: the leaves.

    Yields:
      A job for each layer; the job itself where there is no stack that can be taken apart.

    >>> from jaxpruner.oneshot.calibration import calibrate
    >>> params = {'w': jnp.ones((3, 2, 2))}
    >>> apply_fn = lambda params, x: jax.lax.scan(lambda x, w: (x @ w, None), x, params['w'])[0]
    >>> (entry,) = calibrate(apply_fn, params, [jnp.ones((4, 2))])['w']
    >>> [job.layer for job in one_by_one(Job(('w',), *entry, 0.5), PrunedLeaves(params))]
    [0, 1, 2]
    """
    if job.layer is not None or not found.has_layers(job.path, job.matrices):
        yield job
        return
    for layer in range(job.matrices.layout.shape[0]):
        statistics = jax.tree.map(functools.partial(of_layer, layer=layer), job.statistics)
        yield job._replace(
            statistics=statistics, sparsity=of_layer(job.sparsity, layer), layer=layer
        )


def of_layer(each: Any, layer: int | None) -> Any:
    """The value for a layer where there is one for each, else the one for all.

    Args:
      each: a scalar or an array.
      layer: `None` for all layers.

    >>> of_layer(jnp.array([1, 2]), 1).item(), of_layer(3, 1)
    (2, 3)
    """
    return each if layer is None or not jnp.ndim(each) else each[layer]
