"""`shrink`: from a model to a smaller one of the same kind, in one call."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpruner.oneshot.batches import as_inputs
from jaxpruner.structure import modules, shrunk_modules
from jaxpruner.structure.choosing import Choice
from jaxpruner.structure.graph import ChannelGraph, channel_groups
from jaxpruner.structure.modules import ModelArrays
from jaxpruner.structure.programs import is_array
from jaxpruner.tree import PyTree


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShrunkModel:
    """A smaller model. Made by `shrink`, and printed as the table of its plan.

    Attributes:
      model: of the kind that was given: a module, or the pair `(small_apply, small_params)`.
      plan: which channels stay, and what the model costs before and after.
      graph: of the whole model, for what one call does not do.

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
    _numbers: shrunk_modules.Numbers = dataclasses.field(default_factory=dict)

    @property
    def keep(self) -> Mapping[str, np.ndarray]:
        """Name of a group -> the indices of its channels that stay; groups that stay whole have no entry."""
        return self.plan.keep

    @property
    def numbers(self) -> Mapping[str, tuple[Any, Any]]:
        """Attribute, such as `'conv.feature_group_count'` -> old and new value, for those that had to be set."""
        return {'.'.join(path): widths for path, widths in self._numbers.items()}

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

        def shrink_tree(tree: PyTree) -> Any:
            small = self.graph.shrink(tree, self.keep, allow_inexact=True, verify=False)
            return shrunk_modules.set_numbers(small, type(self.model), self._numbers)

        optimizer = modules.shrunk_optimizer(state, shrink_tree, self.model)
        return shrink_tree(state) if optimizer is None else optimizer

    def __repr__(self) -> str:
        return f'ShrunkModel({type(self.model).__name__}, {self.plan!r})'

    def __str__(self) -> str:
        return str(self.plan)


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
      model: an NNX module, an Equinox module, or a pair `(apply_fn, params)` with `apply_fn(params, *inputs)`. If the
        parameters are variables of linen, a mapping with the entry `'params'`, then the other entries, such as
        `'batch_stats'`, are cut along, and are neither scored nor counted. `apply_fn` has to evaluate: `train=False`.
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
      TypeError: the model is of another kind; or an input is no array.
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
    inputs = as_inputs(inputs)
    if not all(map(is_array, jax.tree.leaves(inputs))):
        raise TypeError('inputs have to be arrays: the smaller model is checked on them')
    is_pair = type(model) is tuple and len(model) == 2 and callable(model[0])
    arrays = _arrays_of_pair(model, inputs) if is_pair else modules.arrays_of(model, inputs, call)
    if arrays is None:
        given, function = modules.describe(model)
        raise TypeError(
            f'shrink takes an NNX or Equinox module or a pair, got {given}; give ({function}, params)'
        )
    if is_pair and call is not None:
        raise TypeError('call is for modules; a pair has its apply_fn')
    graph = channel_groups(arrays.apply, arrays.params, *arrays.inputs, state=arrays.state)
    if batches is not None:
        settings['batches'] = (arrays.arguments(as_inputs(batch)) for batch in batches)
    plan = graph.choose(arrays.params, budget, **settings)
    allow_inexact = settings.get('allow_inexact', False)
    if not is_pair:
        module, numbers = shrunk_modules.shrunk_module(arrays, graph, plan.keep, allow_inexact)
        return ShrunkModel(module, plan, graph, numbers)
    small_params = graph.shrink(arrays.params, plan.keep, allow_inexact)
    small_state = graph.shrink(arrays.state, plan.keep, allow_inexact)
    small_variables = arrays.make(small_params, small_state)
    small_apply = graph.small_apply(plan.keep, allow_inexact)

    def small_fn(variables: PyTree, *inputs: Any) -> Any:
        params, state = _split(variables)
        return small_apply(params, *arrays.arguments(inputs, state))

    return ShrunkModel((small_fn, small_variables), plan, graph)


def _arrays_of_pair(pair: tuple[Any, PyTree], inputs: tuple[Any, ...]) -> ModelArrays:
    """The arrays of a pair. Variables of linen beside the parameters are its state."""
    apply_fn, variables = pair
    params, state = _split(variables)

    def make(params: PyTree, state: PyTree) -> Any:
        if not _are_of_linen(variables):
            return params
        return type(variables)({'params': params, **(state or {})})

    def run(variables: PyTree, state: PyTree, *inputs: Any) -> Any:
        del state  # among the variables
        return apply_fn(variables, *inputs)

    return ModelArrays(params, state, inputs, make, run)


def _are_of_linen(variables: PyTree) -> bool:
    return isinstance(variables, Mapping) and 'params' in variables


def _split(variables: PyTree) -> tuple[PyTree, PyTree | None]:
    """Splits variables of linen into the parameters and a state, `None` if there are no others."""
    if not _are_of_linen(variables):
        return variables, None
    others = {name: part for name, part in variables.items() if name != 'params'}
    return variables['params'], others or None
