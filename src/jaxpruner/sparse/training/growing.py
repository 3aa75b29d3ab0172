"""How algorithms of compact training choose what is grown: each has an entry of `GROW_SCORES`.

All of them drop the blocks or weights of the smallest magnitudes. They differ in the scores by which others are grown.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import control, seeds

Shapes = Mapping[str, tuple[int, ...]]
Scores = Mapping[str, jax.Array]


class GrowthInputs(NamedTuple):
    """What a rule of growth may read.

    Attributes:
      shapes: of the scores, by name of the leaf: a number for each block or weight that could be stored.
      rng_seed: of the model.
      step: the number of the step.
      gradients: returns the gradients that the caller of `update` gave; `None` if there are none.
      argument: what `update` calls the gradients, for messages.
    """

    shapes: Shapes
    rng_seed: Any
    step: Any
    gradients: Callable[[], Scores | None]
    argument: str


def random_scores(inputs: GrowthInputs) -> dict[str, jax.Array]:
    """SET grows at random: the scores are drawn anew at each step."""
    key = seeds.prng_key(inputs.rng_seed, inputs.step)
    keys = seeds.split_key(key, len(inputs.shapes))
    scores = {}
    for name, key in zip(inputs.shapes, keys, strict=True):
        draw = functools.partial(jax.random.uniform, shape=inputs.shapes[name])
        scores[name] = control.draw_in_loop(draw, key)
    return scores


def gradient_magnitudes(inputs: GrowthInputs) -> dict[str, jax.Array]:
    """RigL grows where gradients are largest.

    Raises:
      ValueError: gradients are missing.
    """
    gradients = inputs.gradients()
    if gradients is None:
        raise ValueError(
            f'update: rigl grows by {inputs.argument}, the gradient of the loss with respect to model.probe(); pass '
            'it, or a function that computes it, or use set'
        )
    return {name: jnp.abs(gradients[name]) for name in inputs.shapes}


# The algorithms by their names in configurations.
STATIC, SET, RIGL = 'static_sparse', 'set', 'rigl'  # static training grows nothing
GROW_SCORES: Mapping[str, Callable[[GrowthInputs], Scores]] = {
    SET: random_scores,
    RIGL: gradient_magnitudes,
}
ALGORITHMS = (STATIC, *GROW_SCORES)
