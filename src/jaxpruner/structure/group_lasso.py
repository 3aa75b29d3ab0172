"""Group lasso: training pulls whole channels to zero."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.leaf_numbers import leaf_numbers
from jaxpruner.structure.channel_tables import ChannelTable, channel_table
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.grouped_channels import GroupedChannels

Arrays = dict[tree_lib.Path, jax.Array]


class GroupLassoState(NamedTuple):
    """The state of `group_lasso`.

    Attributes:
      count: how many steps have been taken, an int32 scalar.
    """

    count: jax.Array


def group_lasso(
    graph: ChannelGraph,
    strength: optax.ScalarOrSchedule,
    groups: str | Sequence[str] | None = None,
) -> optax.GradientTransformation:
    r"""Group lasso over channels, in its proximal form: an optax transformation that makes whole channels zero.

    It stands last in a chain, and shrinks the parameters $w$ that the step leads to, channel by channel:

    $$w_c \leftarrow \max\left(0,\; 1 - \frac{\lambda \sqrt{n_c}}{\lVert w_c \rVert_2}\right) w_c,$$

    where $w_c$ are the weights of a channel in all of its leaves (kernels, biases, norms), $n_c$ is their number, and
    $\lambda$ is `strength`. This is the proximal operator of $\lambda \sum_c \sqrt{n_c} \lVert w_c \rVert_2$. A
    gradient of that sum would only come near zero; here channels become zero exactly, and `graph.nonzero_channels`
    says which are left. A weight may lie in two channels, that of its input and that of its output. Both factors are
    taken of the same weights, and multiplied.

    The strength is not multiplied by a learning rate. With `optax.sgd(rate)` before it, `rate * lambda` is proximal
    gradient descent on the loss with the penalty above. Nothing after it may rescale updates.

    Yuan and Lin, "Model selection and estimation in regression with grouped variables", 2006; for the channels of
    networks Wen et al., "Learning structured sparsity in deep neural networks", 2016.

    Args:
      graph: of the model; the parameters may be a subtree of its parameters.
      strength: $\lambda$, from 0 up, or a schedule: a function of the step.
      groups: names or globs of groups, as in `GroupedChannels`.

    Returns:
      A transformation whose `update` needs `params`. Updates have the result type of update and parameter.

    Raises:
      TypeError: `graph` is no `ChannelGraph`, or `strength` is no number.
      KeyError: a name matches no group.
      ValueError: `strength` is negative or not finite; or, by `update`, there are no `params`, or those of another
        model.

    >>> import jax.numpy as jnp
    >>> import jaxpruner
    >>> params = {'up': jnp.array([[3.0, 0.1]]), 'down': jnp.array([[4.0], [0.1]])}
    >>> graph = jaxpruner.channel_groups(lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], params, jnp.ones((5, 1)))
    >>> tx = optax.chain(optax.sgd(0.1), group_lasso(graph, strength=0.5))
    >>> no_grads = {'up': jnp.zeros((1, 2)), 'down': jnp.zeros((2, 1))}
    >>> updates, _ = tx.update(no_grads, tx.init(params), params)
    >>> graph.nonzero_channels(optax.apply_updates(params, updates))
    {'up[1]': array([0])}
    """
    chosen = GroupedChannels(graph, groups).chosen
    if not callable(strength):
        _check_strength(strength)
    tables_of: dict[Any, list[ChannelTable]] = {}

    def tables(paths: Sequence[tree_lib.Path]) -> list[ChannelTable]:
        key = tuple(paths)
        if key not in tables_of:
            numbers = leaf_numbers(graph.trace, paths)
            tables_of[key] = [channel_table(graph.trace, group, numbers) for group in chosen]
        return tables_of[key]

    def init(params: tree_lib.PyTree) -> GroupLassoState:
        del params
        return GroupLassoState(jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GroupLassoState]:
        if params is None:
            raise ValueError(
                'group_lasso shrinks parameters: pass them, tx.update(updates, state, params)'
            )
        threshold = strength(state.count) if callable(strength) else strength
        paths, weights, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
        steps = tree_lib.leaves_like(treedef, updates)
        after = {}
        for path, weight, step in zip(paths, weights, steps, strict=True):
            if step is not None:
                after[path] = weight + step
        factors = _factors(tables(paths), after, threshold)
        new = []
        for path, weight, old_step in zip(paths, weights, steps, strict=True):
            step = old_step
            if path in factors:
                # What is to be 0 becomes it exactly: the weight plus its own negative.
                step = (after[path] * factors[path]).astype(after[path].dtype) - weight
            new.append(step)
        count = optax.safe_increment(state.count)
        return jax.tree.unflatten(treedef, new), GroupLassoState(jnp.asarray(count))

    return optax.GradientTransformation(init, update)


def _factors(tables: Sequence[ChannelTable], weights: Arrays, threshold: Any) -> Arrays:
    """What the weights of each leaf are multiplied by."""
    factors: Arrays = {}
    for table in tables:
        members = [path for path in table.places if path in weights]
        squares = {path: jnp.square(weights[path].astype(jnp.float32)) for path in members}
        numbers = {path: jnp.ones(weights[path].shape) for path in members}
        norms = jnp.sqrt(table.add_up(squares))
        least = threshold * jnp.sqrt(table.add_up(numbers))
        factor = jnp.where(norms > least, 1 - least / jnp.where(norms > least, norms, 1), 0)
        for path in members:
            part = table.look_up(factor, path)
            factors[path] = factors[path] * part if path in factors else part
    return factors


def _check_strength(strength: Any) -> None:
    if not tree_lib.is_number(strength):
        raise TypeError(f'strength is a number or a schedule, got {strength!r}')
    if not (np.isfinite(strength) and strength >= 0):
        raise ValueError(f'strength must be finite and at least 0, got {strength}')
