"""Training that removes whole channels from all of their leaves: a sparsity type of pruners, and group lasso."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import selection
from jaxpruner import tree as tree_lib
from jaxpruner.mask_calculator import MASK_DTYPE, ScoredLeaf
from jaxpruner.sparsity_types import Unstructured
from jaxpruner.structure.axes import size_with, sizes_of
from jaxpruner.structure.channel_tables import ChannelTable, paths_in_model
from jaxpruner.structure.choosing import matching
from jaxpruner.structure.cut import check_shape
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.groups import Group
from jaxpruner.structure.zeros import inexact_atoms
from jaxpruner.tree import Path

Shapes = Mapping[Path, tuple[int, ...]]
Targets = Mapping[Path, Any]  # the sparsity of a leaf, or `None`


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GroupedChannels:
    r"""The sparsity type of a pruner that removes channels from all of their leaves.

    A hidden unit is a column of one kernel, an element of a bias and a row of the next kernel. `Channel` decides for
    each leaf by itself, so that little can be removed from a model afterwards. Here each group of a graph has one
    ranking. The score of a channel is the sum of the scores of all its weights,

    $$s_c = \sum_{w \in c} s_w,$$

    and `sparsity` is the share of the channels to remove. Biases and norms get masks, too, although the default filter
    leaves them out. Where layers of a scan, experts or heads may keep channels of their own, each has a ranking of its
    own, and all keep the same number. After training `graph.nonzero_channels(opt_state)` says which channels stay.
    `graph.shrink` then removes the others, and the model computes the same function.

    A group has the sparsity of its leader: of its leaves with more than one axis, the one that the model uses first. So
    `sparsity_distribution_fn` and `custom_sparsity_map` apply to leaders. A group whose leader has no sparsity stays
    whole. Some members may be no parameters of the pruner, such as running statistics, or may be left dense by name, if
    zeros in the other members remove the channel.

    It works with any pruner that ranks scores leaf by leaf. Global rankings refuse it. SET, RigL and AC/DC refuse it,
    too: a channel that is zero in all leaves has no gradient, so it could not come back.

    Args:
      graph: of the model, made by `channel_groups`. The parameters of the pruner may be a subtree of its parameters
        (`{'params': …, 'batch_stats': …}`).
      groups: names or globs of the groups that are pruned; by default all. Groups that are not exact, and layers of a
        scan, are only pruned if they are given by their full name.

    Raises:
      KeyError: a name matches no group.
      ValueError: a name matches no exact group. Raised by `init` of a pruner: leaves have other shapes
        than in the graph, or a leaf without a mask would have to have one.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpruner
    >>> def apply(p, x):
    ...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
    >>> params = {'up': jnp.array([[1.0, 9.0, 2.0, 8.0]]), 'bias': jnp.ones(4), 'down': jnp.ones((4, 2))}
    >>> graph = jaxpruner.channel_groups(apply, params, jnp.ones((1, 1)))
    >>> pruner = jaxpruner.MagnitudePruning(sparsity_type=GroupedChannels(graph), sparsity=0.5)
    >>> pruned, masks = pruner.instant_sparsify(params)
    >>> masks['bias'].tolist(), masks['down'][:, 0].tolist()
    ([0, 1, 0, 1], [0, 1, 0, 1])
    >>> keep = graph.nonzero_channels(masks)
    >>> graph.shrink(pruned, keep)['up']
    Array([[9., 8.]], dtype=float32)
    """

    graph: ChannelGraph
    groups: str | Sequence[str] | None = None
    chosen: tuple[Group, ...] = dataclasses.field(init=False)  # the groups that are pruned

    def __post_init__(self):
        groups = self.graph.groups
        chosen: dict[str, Group] = {}
        for name in tree_lib.as_names(self.groups or '*'):
            usable = {
                match: groups[match]
                for match in matching(name, groups, 'groups')
                if groups[match].exact and (match == name or not groups[match].is_depth)
            }
            if not usable:
                raise ValueError(f'groups={name!r}: no group is exact; print(graph) says why')
            chosen |= usable
        object.__setattr__(self, 'chosen', tuple(chosen.values()))

    def __repr__(self) -> str:
        return f'GroupedChannels({", ".join(group.name for group in self.chosen)})'

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape; `join` compares shapes with those of the graph."""

    def join(self, shapes: Shapes, targets: Targets) -> list[tuple[Path, ChannelTable]]:
        """The groups whose leaders have a target: the leader, and the channels in these leaves."""
        trace = self.graph.trace
        paths = paths_in_model(trace, shapes)
        for path, in_model in paths.items():
            check_shape(path, shapes[path], sizes_of(trace.leaves[in_model]))
        path_of = {in_model: path for path, in_model in paths.items()}
        joined = []
        for group in self.chosen:
            own = [member.path for member in group.members]
            # Of the leaves with more than one axis, the one that the model uses first.
            leader = min(own, key=lambda p: (len(trace.leaves[p]) < 2, trace.first_uses[p]))
            leader = path_of.get(leader, ())
            if targets.get(leader) is not None:
                joined.append((leader, ChannelTable.of(trace, group, paths)))
        return joined

    def targets_of(self, shapes: Shapes, targets: Targets) -> dict[Path, Any]:
        """Gives each leaf of a pruned group a target, and takes it from leaves of no such group.

        Biases, which the default filter leaves out, are so removed with their channel. On their own they keep
        everything.

        Raises:
          ValueError: leaves outside of these would have to have masks, too.
        """
        tied: dict[Path, Any] = dict.fromkeys(shapes)
        zeroed, missing = {}, {}
        joined = self.join(shapes, targets)
        for _, table in joined:
            tied |= dict.fromkeys(table.indices, 0.0)
            own = {member for members in table.indices.values() for member in members}
            names = {member.name for member in table.group.members if member not in own}
            if names:  # else all members are zero, and the group is exact
                zeroed[table.group.atom] = frozenset([(each.path, each.axis) for each in own])
                missing[table.group.atom] = ', '.join(sorted(names))
        tied |= {leader: targets[leader] for leader, _ in joined}
        for atom in missing.keys() & inexact_atoms(self.graph.traces, zeroed) if missing else ():
            raise ValueError(
                f'channels do not vanish while {missing[atom]} get no masks; prune these leaves, too, or leave their '
                f'group out of groups={self.groups!r}'
            )
        return tied

    def make_masks(
        self, scored: Mapping[Path, Any], rank: Callable[[list[Any]], list[jax.Array]]
    ) -> dict[Path, jax.Array]:
        """Masks the leaves by the groups that they share: each has one score, pooled over all of its leaves.

        Args:
          scored: a `mask_calculator.ScoredLeaf` for each leaf.
          rank: makes the mask of each of some leaves.
        """
        scores = {path: selection.read(leaf.scores) for path, leaf in scored.items()}
        shapes = {path: leaf.shape for path, leaf in scores.items()}
        joined = self.join(shapes, scored)
        pooled = []
        for leader, table in joined:
            of_channels = table.add_up({path: scores[path] for path in table.indices})
            layer_axis = None
            if of_channels.ndim > 1:  # layers, experts or heads keep channels of their own
                of_channels, layer_axis = of_channels.reshape(-1, table.group.size), 0
            pooled.append(
                ScoredLeaf(of_channels, scored[leader].sparsity, Unstructured(), layer_axis)
            )
        masks = {path: jnp.ones(shape, MASK_DTYPE) for path, shape in shapes.items()}
        for (_, table), verdicts in zip(joined, rank(pooled), strict=True):
            for path in table.indices:
                mask = table.look_up(verdicts.reshape(table.shape), path)
                masks[path] *= mask.astype(MASK_DTYPE)
        return masks

    def kept_weights(self, shapes: Shapes, targets: Targets) -> dict[Path, int]:
        """Counts the weights of each leaf that are kept at these targets."""
        sizes, leaves = {}, {}
        for leader, table in self.join(shapes, targets):
            group, share = table.group, float(targets[leader])
            sizes[group.atom] = selection.number_to_keep_on_host(group.size, share)
            for path, (member, *_) in table.indices.items():
                leaves[path] = self.graph.trace.leaves[member.path]
        return {
            path: math.prod(size_with(axis, sizes) for axis in own) for path, own in leaves.items()
        }


def group_lasso(
    graph: ChannelGraph, strength: Any, groups: str | Sequence[str] | None = None
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
    gradient descent on the loss with the penalty above. Nothing after it may rescale updates. For a schedule of
    strengths there is `optax.inject_hyperparams(group_lasso)(graph, schedule)`.

    Yuan and Lin, "Model selection and estimation in regression with grouped variables", 2006; for the channels of
    networks Wen et al., "Learning structured sparsity in deep neural networks", 2016.

    Args:
      graph: of the model. The parameters may be a subtree of its parameters.
      strength: $\lambda$, a number from 0 up.
      groups: names or globs of groups, as in `GroupedChannels`.

    Returns:
      A transformation whose `update` needs `params`. Updates have the result type of update and parameter.

    Raises:
      KeyError: a name matches no group.
      ValueError: `strength` is no number from 0 up. Raised by `update`: `params` are missing, or those of another
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
    is_number = tree_lib.is_number(strength)
    if not is_number or not (tree_lib.is_traced(strength) or 0 <= strength < np.inf):
        raise ValueError(f'strength is a number from 0 up, got {strength!r}')

    def shrink(updates: Any, params: Any) -> Any:
        if params is None:
            raise ValueError(
                'pass the parameters to group_lasso: tx.update(updates, state, params)'
            )
        paths, weights, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
        steps = tree_lib.leaves_like(treedef, updates)
        triples = list(zip(paths, weights, steps, strict=True))
        new_weights = {path: weight + step for path, weight, step in triples if step is not None}
        in_model = paths_in_model(graph.trace, new_weights)
        factors: dict[Path, Any] = {}
        for group in chosen:
            table = ChannelTable.of(graph.trace, group, in_model)
            own = [(path, new_weights[path].astype(jnp.float32)) for path in table.indices]
            norms = jnp.sqrt(table.add_up({path: weight**2 for path, weight in own}))
            counts = table.add_up({path: jnp.ones(weight.shape) for path, weight in own})
            norms = jnp.maximum(norms, np.finfo(np.float32).tiny)
            of_channels = jnp.maximum(0, 1 - strength * jnp.sqrt(counts) / norms)
            for path in table.indices:
                factors[path] = factors.get(path, 1) * table.look_up(of_channels, path)
        for i, (path, weight, _) in enumerate(triples):
            if path in factors:
                # Of a weight that is shrunk to 0 the step is minus the weight, so that their sum is exactly 0.
                new = new_weights[path]
                steps[i] = (new * factors[path]).astype(new.dtype) - weight
        return jax.tree.unflatten(treedef, steps)

    return optax.stateless(shrink)
