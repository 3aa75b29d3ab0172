"""Span corruption, T5's objective: spans of a text are replaced by sentinels, and the target is what stood there.

Everything has a length that is known beforehand, so it runs inside a compiled program (Raffel et al. 2020,
https://arxiv.org/abs/1910.10683, section 3.1.4).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

START = 0  # also padding
END = 1
SYMBOLS = 2  # the first token that stands for text


class Lengths(NamedTuple):
    """How many tokens there are of what in an example of `text` tokens.

    >>> Lengths.of(568, noise_density=0.15, mean_span=3.0)  # T5's own
    Lengths(text=568, noise=85, spans=28)
    """

    text: int
    noise: int  # tokens that are replaced
    spans: int  # in so many runs

    @classmethod
    def of(cls, text: int, noise_density: float, mean_span: float) -> 'Lengths':
        """The lengths for a share of noise."""
        noise = round(text * noise_density)
        spans = max(1, round(noise / mean_span))
        if not 1 <= spans <= noise <= text - spans:
            raise ValueError(
                f'{text} tokens with noise_density {noise_density} and mean_span {mean_span} make {noise} tokens of '
                f'noise in {spans} spans, which does not fit: use longer texts, or values such as 0.15 and 3'
            )
        return cls(text, noise, spans)

    @property
    def inputs(self) -> int:
        """Tokens that the encoder sees: what is kept, a sentinel a span, and the end."""
        return self.text - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        """Tokens that the decoder predicts: what was replaced, a sentinel a span, and the end."""
        return self.noise + self.spans + 1


def noise_mask(key: jax.Array, lengths: Lengths) -> jax.Array:
    """Draws which tokens are replaced: kept and replaced runs in turn, beginning with a kept one."""
    key_kept, key_noise = jax.random.split(key)
    kept = _segments(key_kept, lengths.text - lengths.noise, lengths.spans)
    noise = _segments(key_noise, lengths.noise, lengths.spans)
    ends = jnp.cumsum(jnp.stack([kept, noise], axis=1).reshape(-1))
    run = jnp.searchsorted(ends, jnp.arange(lengths.text), side='right')
    return run % 2 == 1


def corrupt(
    tokens: jax.Array, is_noise: jax.Array, lengths: Lengths, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """Splits a text into what is given and what is to be predicted.

    >>> mask = jnp.array([0, 0, 1, 1, 0, 1], bool)
    >>> inputs, targets = corrupt(jnp.array([2, 3, 4, 5, 6, 7]), mask, Lengths(6, 3, 2), vocabulary=100)
    >>> inputs.tolist(), targets.tolist()
    ([2, 3, 99, 6, 98, 1], [99, 4, 5, 98, 7, 1])
    """
    before = jnp.concatenate([jnp.array([False]), is_noise[:-1]])
    first_of_noise = is_noise & ~before
    sentinels = vocabulary - jnp.cumsum(first_of_noise)

    def compact(places: jax.Array, values: jax.Array, length: int) -> jax.Array:
        kept = values[jnp.nonzero(places, size=length - 1)[0]]
        return jnp.concatenate([kept, jnp.array([END])]).astype(jnp.int32)

    inputs = compact(
        ~is_noise | first_of_noise, jnp.where(is_noise, sentinels, tokens), lengths.inputs
    )
    # A run's sentinel stands before its first token: each place is doubled.
    places = jnp.stack([first_of_noise, is_noise], axis=1).reshape(-1)
    values = jnp.stack([sentinels, tokens], axis=1).reshape(-1)
    return inputs, compact(places, values, lengths.targets)


def _segments(key: jax.Array, items: int, segments: int) -> jax.Array:
    """Random lengths of at least 1 that add up to `items`, int[segments]: each such division is as likely."""
    cuts = jnp.sort(jax.random.permutation(key, items - 1)[: segments - 1]) + 1
    return jnp.diff(cuts, prepend=0, append=items)
