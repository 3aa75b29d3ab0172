"""Group lasso: training pulls whole channels to zero."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.structure.channel_tables import ChannelTable, paths_in_model
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.grouped_channels import GroupedChannels
from jaxpruner.tree import Path, PyTree


class GroupLassoState(NamedTuple):
    """The state of `group_lasso`.

    Attributes:
      count: how many steps have been taken, an int32 scalar.
    """

    count: jax.Array


def group_lasso(
    graph: ChannelGraph, strength: optax.ScalarOrSchedule, groups: str | Sequence[str] | None = None
) -> optax.GradientTransformation:
    r"""Group lasso over channels, in its proximal form: an optax transformation that makes whole channels zero.

    It has to be the last in a chain. It shrinks the parameters $w$ that the step leads to, channel by channel:

    $$w_c \leftarrow \max\left(0,\; 1 - \frac{\lambda \sqrt{n_c}}{\lVert w_c \rVert_2}\right) w_c,$$

    where $w_c$ are the weights of a channel in all of its leaves (kernels, biases, norms), $n_c$ is their number, and
    $\lambda$ is `strength`. This is the proximal operator of $\lambda \sum_c \sqrt{n_c} \lVert w_c \rVert_2$. With
    a gradient of that sum, channels would only come near zero. Here they become exactly zero, and
    `graph.nonzero_channels` says which are left. A weight may lie in two channels, that of its input and that of its
    output. Then both factors are computed from the same weights, and multiplied.

    The strength is not multiplied by a learning rate. With `optax.sgd(rate)` before it, `rate * lambda` is proximal
    gradient descent on the loss with the penalty above. Nothing after it may rescale updates.

    Yuan and Lin, "Model selection and estimation in regression with grouped variables", 2006; for the channels of
    networks Wen et al., "Learning structured sparsity in deep neural networks", 2016.

    Args:
      graph: of the model. The parameters may be a subtree of its parameters.
      strength: $\lambda$, from 0 up, or a schedule: a function of the step.
      groups: names or globs of groups, as in `GroupedChannels`.

    Returns:
      A transformation whose `update` needs `params`. Updates have the result type of update and parameter.

    Raises:
      TypeError: `graph` is no `ChannelGraph`.
      KeyError: a name matches no group.
      ValueError: `strength` is no schedule, and no number from 0 up. Raised by `update`: `params` are missing, or those
        of another model.

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
    number: Any = strength
    is_number = tree_lib.is_number(number) and 0 <= number < np.inf
    if not (callable(strength) or is_number):
        raise ValueError(f'strength is a schedule or a number from 0 up, got {strength!r}')

    def init(params: PyTree) -> GroupLassoState:
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
        new_weights = {
            path: weight + step
            for path, weight, step in zip(paths, weights, steps, strict=True)
            if step is not None
        }
        factors: dict[Path, Any] = {}
        in_model = paths_in_model(graph.trace, paths)
        for group in chosen:
            table = ChannelTable.of(graph.trace, group, in_model)
            own = {path: new_weights[path] for path in table.indices if path in new_weights}
            squares = {path: jnp.square(weight.astype(jnp.float32)) for path, weight in own.items()}
            ones = {path: jnp.ones(weight.shape) for path, weight in own.items()}
            norms = jnp.sqrt(table.add_up(squares))
            least_norms = threshold * jnp.sqrt(table.add_up(ones))
            stays = norms > least_norms
            of_channels = jnp.where(stays, 1 - least_norms / jnp.where(stays, norms, 1), 0)
            for path in own:
                factors[path] = factors.get(path, 1) * table.look_up(of_channels, path)
        new_steps = []
        for path, weight, step in zip(paths, weights, steps, strict=True):
            if path in factors:
                new_weight = new_weights[path]
                # Shrunk to 0, the step is minus the weight, so that their sum is exactly 0.
                step = (new_weight * factors[path]).astype(new_weight.dtype) - weight
            new_steps.append(step)
        count = jnp.asarray(optax.safe_increment(state.count))
        return jax.tree.unflatten(treedef, new_steps), GroupLassoState(count)

    return optax.GradientTransformation(init, update)
