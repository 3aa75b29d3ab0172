"""`shrink`: from a model to a smaller one of the same kind, in one call.

A module's code may hold widths as numbers: `x.reshape(n, self.num_heads, -1)`. It may also compute numbers from its new
widths where the zeroed model has the old ones, such as the mean of a LayerNorm. So the module runs on the inputs, and
has to give what the whole module gives with zeros at the removed channels. If it does not, layers whose own arrays were
cut get their new widths, such as `nnx.Conv.feature_group_count`. No other numbers are set.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpruner.oneshot.leaves import as_inputs
from jaxpruner.structure.axes import atoms, sizes_of
from jaxpruner.structure.choosing import Choice
from jaxpruner.structure.cut import Cut, KeepByGroup
from jaxpruner.structure.graph import ChannelGraph, channel_groups
from jaxpruner.structure.programs import ModelArrays, Trace, arrays_of
from jaxpruner.structure.small_model import SmallApply
from jaxpruner.tree import Path, PyTree, is_instance

_MOST_NAMES = 6  # in a message

# Attribute, such as `'conv.feature_group_count'` -> its old value, and the new one; `None` if it is not known.
Numbers = Mapping[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShrunkModel:
    """A smaller model. Made by `shrink`, and printed as the table of its plan.

    Attributes:
      model: of the kind that was given: a module, or the pair `(small_apply, small_params)`.
      plan: which channels stay, and what the model costs before and after.
      graph: of the whole model, for what one call does not do.
      numbers: attribute, such as `'conv.feature_group_count'` -> old and new value, for those that had to be set.

    >>> import jax, jax.numpy as jnp
    >>> def apply_fn(params, x):
    ...     return jax.nn.relu(x @ params['up']) @ params['down']
    >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((4, 1))}
    >>> small = shrink((apply_fn, params), jnp.ones((5, 2)), 'flops=0.5')
    >>> small.keep
    {'up[1]': array([2, 3])}
    >>> small.shrink_state({'mu': params})['mu']['up'].shape
    (2, 2)
    """

    model: Any
    plan: Choice
    graph: ChannelGraph
    numbers: Numbers = dataclasses.field(default_factory=dict)

    @property
    def keep(self) -> Mapping[str, np.ndarray]:
        """Name of a group -> the indices of its channels that stay; groups that stay whole have no entry."""
        return self.plan.keep

    def shrink_state(self, state: PyTree) -> Any:
        """Cuts an optimizer's state along: moments, masks and averages lose the channels that the model lost.

        Args:
          state: of an optimizer, wrapped by a pruner or not; an `nnx.Optimizer`; an `equinox.nn.State`; or any other
            tree that `ChannelGraph.shrink` takes.

        Returns:
          The same kind of thing with smaller arrays.

        Raises:
          ValueError: as in `ChannelGraph.shrink`, such as for factored moments.
        """
        if is_instance(state, 'flax.nnx', 'Optimizer'):
            from flax import nnx

            graphdef, arrays = nnx.split(state)
            optimizer = nnx.merge(graphdef, self.shrink_state(arrays))
            if 'model' in vars(optimizer):  # of older Flax
                optimizer.model = self.model
            return optimizer
        small = self.graph.shrink(state, self.keep, allow_inexact=True, verify=False)
        return _set_numbers(small, type(self.model), self.numbers)

    def __repr__(self) -> str:
        return repr(self.plan)


def shrink(
    model: Any,
    inputs: Any,
    budget: str | None = None,
    *,
    call: Callable[..., Any] | None = None,
    batches: Iterable[Any] | None = None,
    **settings: Any,
) -> ShrunkModel:
    """Removes channels from a model until a budget is met, and returns a smaller model of the same kind.

    This is `channel_groups`, `ChannelGraph.choose` and `ChannelGraph.shrink` in one call. The model is traced in
    evaluation mode, and stays as it is.

    A smaller NNX or Equinox module has the code of the whole one, and smaller arrays, batch statistics too. It runs on
    the inputs, and has to give what the whole module gives with zeros at the removed channels. If it does not, layers
    whose own arrays were cut get their new widths, such as the `feature_group_count` of `nnx.Conv`. If it still does
    not, it is refused, with the widths that other modules hold, such as `num_heads`.

    Args:
      model: an NNX module, an Equinox module, or a pair `(apply_fn, params)` with `apply_fn(params, *inputs)`. `params`
        may be all variables of linen: statistics count as parameters then. `apply_fn` has to evaluate: `train=False`.
      inputs: arrays, for which the model is traced and on which it is checked; a tuple holds several inputs. An
        `equinox.nn.State` among them is cut along; `ShrunkModel.shrink_state` returns the smaller one.
      budget: as in `ChannelGraph.choose`: `'flops=0.5'` and the like.
      call: `(module, *inputs) -> results`, how a module is called, if not by `module(*inputs)`. An Equinox module takes
        one example: `call=lambda module, x: jax.vmap(module)(x)`.
      batches: as in `ChannelGraph.choose`, for calibrated scores; each is like `inputs`.
      **settings: others of `ChannelGraph.choose`: `score=`, `round_to=`, `leave=`, `counts=`, …. With
        `allow_inexact=True` it is enough that a module runs. A LayerNorm then takes its mean over fewer channels.

    Returns:
      The smaller model, what it keeps, and what cuts optimizer states along.

    Raises:
      TypeError: the model is of another kind; or the inputs are missing, or a list.
      ValueError: as in `ChannelGraph.choose`; or the code of the module does not follow its arrays.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> class Network(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up, self.down = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.down(nnx.relu(self.up(x)))
    >>> x = jax.random.normal(jax.random.key(0), (5, 4))
    >>> small = shrink(Network(nnx.Rngs(0)), x, 'flops=0.5')
    >>> type(small.model).__name__, small.model.up.kernel.shape, small.model(x).shape
    ('Network', (4, 8), (5, 2))
    """
    if isinstance(inputs, str | list):
        fault = 'are a list' if isinstance(inputs, list) else f'are missing before {inputs!r}'
        raise TypeError(
            f"the inputs {fault}: give what the model takes, as in shrink(model, x, 'flops=0.5'); several are a tuple, "
            '(x, y), and a list that is one input stands in a tuple, ([x, y],)'
        )
    inputs = as_inputs(inputs)
    is_pair = type(model) is tuple and len(model) == 2 and callable(model[0])
    arrays = None if is_pair else arrays_of(model, inputs, call)
    if arrays is not None:
        apply_fn, inputs = arrays.apply, arrays.inputs
        params, state = (*arrays.trees, None)[:2]
    elif not is_pair or call is not None:
        raise TypeError(
            'call is for modules, and shrink takes a function as a pair (apply_fn, params)'
        )
    else:
        (apply_fn, params), state = model, None
    if batches is not None and state is not None:
        batches = ((state, *as_inputs(batch)) for batch in batches)
    graph = channel_groups(apply_fn, params, *inputs, state=state)
    plan = graph.choose(params, budget, batches=batches, **settings)
    cut = plan.keep, settings.get('allow_inexact', False)
    if arrays is None:
        pair = graph.small_apply(*cut), graph.shrink(params, *cut)
        return ShrunkModel(pair, plan, graph)
    module, numbers = _shrunk_module(arrays, graph, *cut)
    return ShrunkModel(module, plan, graph, numbers)


def _shrunk_module(
    arrays: ModelArrays, graph: ChannelGraph, keep: KeepByGroup, allow_inexact: bool
) -> tuple[Any, Numbers]:
    """Makes the smaller module.

    Returns:
      The module, and the numbers that were set on it.

    Raises:
      ValueError: its code does not follow the arrays. If inexact groups are allowed, it is enough that it runs.
    """
    whole = arrays.trees
    small = [graph.shrink(tree, keep, allow_inexact=True, verify=False) for tree in whole]
    small_apply = SmallApply(graph, 0, keep, allow_inexact=True)
    module = arrays.make(*whole)
    held = _held_numbers(module, graph.trace, small_apply.cut)
    of_layers = {name: widths for name, widths in held.items() if widths[1] is not None}
    running, fault = None, ''
    for numbers in ({}, of_layers):

        def make(*trees: PyTree, numbers: Numbers = numbers) -> Any:
            return _set_numbers(arrays.make(*trees), type(module), numbers)

        candidate = arrays._replace(make=make)
        try:
            verification = small_apply.verify(whole, arrays.inputs, candidate.apply)
        except Exception as error:  # whatever the module's code raises
            fault = f'{type(error).__name__}: {error}'.partition('\n')[0]
            continue
        running = make(*small), numbers
        if verification.verdict != 'different':
            return running
        fault = f'its results differ ({verification})'
    if allow_inexact and running is not None:
        return running
    others = [f'{name}={old}' for name, (old, new) in held.items() if new is None]
    holds, were_cut = (', '.join(names[:_MOST_NAMES]) for names in (others, list(keep)))
    raise ValueError(
        f'the code of {type(module).__name__} does not follow its smaller arrays: {fault}; it holds '
        f'{holds or "no old width"}. Give shrink the pair (apply_fn, params); or keep groups whole by leave= (cut were '
        f'{were_cut}); or take a module that runs, and train on, with allow_inexact=True'
    )


def _held_numbers(module: Any, trace: Trace, cut: Cut) -> Numbers:
    """The attributes of a module and of those in it that are old widths of their arrays, or of arrays further down.

    Such a width is a whole number, or a tuple that is the shape of an array. The new value is known if an array of the
    module itself has this width, and all widths of this value change alike.
    """
    news_of: dict[tuple[Path, Any], set[Any]] = defaultdict(set)  # of a module and an old width
    of_own_arrays = set()
    for path, axes in (*trace.leaves.items(), *trace.states.items()):
        widths = [(axis.size, cut.size(axis)) for axis in (*axes, *atoms(*axes))]
        for old, new in (*widths, (sizes_of(axes), cut.shape(axes))):
            of_own_arrays.add((path[:-1], old))
            for depth in range(len(path)):
                news_of[path[:depth], old].add(new)
    held: dict[str, tuple[Any, Any]] = {}
    for path in sorted({path for path, _ in news_of}, key=len):
        for name, old in getattr(_submodule(module, path), '__dict__', {}).items():
            sizes = old if isinstance(old, tuple) else [old]
            news = news_of.get((path, old)) if all(type(size) is int for size in sizes) else None
            if news and news != {old}:
                is_plain = len(news) == 1 and (path, old) in of_own_arrays
                held['.'.join((*path, name))] = old, next(iter(news)) if is_plain else None
    return held


def _submodule(module: Any, path: Iterable[str]) -> Any:
    """The module at a path; `None` if there is none."""
    for name in path:
        if isinstance(module, Sequence):
            module = module[int(name)]
        elif isinstance(module, Mapping):
            module = {str(key): value for key, value in module.items()}.get(name)
        else:
            module = getattr(module, name, None)
    return module


def _set_numbers(tree: PyTree, kind: type, numbers: Numbers) -> PyTree:
    """Sets numbers on each module of a class in a tree whose nodes nothing else holds.

    A tree like the module, such as moments, has the structure of the module, numbers included.
    """
    for node in jax.tree.leaves(tree, is_leaf=lambda node: type(node) is kind):
        if type(node) is kind:
            for path, (_, new) in numbers.items():
                *owner, name = path.split('.')
                # Modules of Equinox are frozen.
                object.__setattr__(_submodule(node, owner), name, new)
    return tree
