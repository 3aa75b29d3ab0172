"""Span corruption, T5's objective: sentinels replace spans of a text, and the target is the spans.

All lengths are known beforehand, so that it runs inside a compiled program (Raffel et al. 2020,
https://arxiv.org/abs/1910.10683, section 3.1.4).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

START = 0  # also padding
END = 1
SYMBOLS = 2  # the first token that stands for text


class Lengths(NamedTuple):
    """How many tokens of an example of `text` tokens are noise, in how many spans.

    >>> Lengths.of(568, noise_density=0.15, mean_span=3.0)  # T5's own
    Lengths(text=568, noise=85, spans=28)
    """

    text: int
    noise: int  # tokens that are replaced
    spans: int  # in so many runs

    @classmethod
    def of(cls, text: int, noise_density: float, mean_span: float) -> 'Lengths':
        """The lengths for a share of noise; a `ValueError` for less text than one span needs."""
        noise = round(text * noise_density)
        spans = max(1, round(noise / mean_span))
        if not 1 <= spans <= noise <= text - spans:
            raise ValueError(
                f'{text} tokens with noise_density {noise_density} and mean_span {mean_span} make '
                f'{noise} tokens of noise in {spans} spans, which does not fit: use longer texts, '
                'or values such as 0.15 and 3'
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
    """Draws which tokens are noise, bool[text]: runs in turn, beginning with a kept one."""
    key_kept, key_noise = jax.random.split(key)
    kept = _segments(key_kept, lengths.text - lengths.noise, lengths.spans)
    noise = _segments(key_noise, lengths.noise, lengths.spans)
    in_turn = jnp.stack([kept, noise], axis=1).reshape(-1)
    ends = jnp.cumsum(in_turn)
    positions = jnp.arange(lengths.text)
    run = jnp.searchsorted(ends, positions, side='right')
    return run % 2 == 1


def corrupt(
    tokens: jax.Array, is_noise: jax.Array, lengths: Lengths, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """Splits a text into inputs int32[lengths.inputs] and targets int32[lengths.targets].

    Sentinels are the last tokens of the vocabulary, in falling order.

    >>> mask = jnp.array([0, 0, 1, 1, 0, 1], bool)
    >>> text, lengths = jnp.array([2, 3, 4, 5, 6, 7]), Lengths(6, 3, 2)
    >>> inputs, targets = corrupt(text, mask, lengths, vocabulary=100)
    >>> inputs.tolist(), targets.tolist()
    ([2, 3, 99, 6, 98, 1], [99, 4, 5, 98, 7, 1])
    """
    before = jnp.concatenate([jnp.array([False]), is_noise[:-1]])
    first_of_noise = is_noise & ~before
    sentinels = vocabulary - jnp.cumsum(first_of_noise)

    def compact(is_kept, values, length):
        (positions,) = jnp.nonzero(is_kept, size=length - 1)
        ended = jnp.concatenate([values[positions], jnp.array([END])])
        return ended.astype(jnp.int32)

    is_input = ~is_noise | first_of_noise
    input_values = jnp.where(is_noise, sentinels, tokens)
    inputs = compact(is_input, input_values, lengths.inputs)
    # A run's sentinel stands before its first token: each position is doubled.
    is_target = jnp.stack([first_of_noise, is_noise], axis=1).reshape(-1)
    values = jnp.stack([sentinels, tokens], axis=1).reshape(-1)
    return inputs, compact(is_target, values, lengths.targets)


def _segments(key: jax.Array, items: int, segments: int) -> jax.Array:
    """Random lengths of at least 1 that add up to `items`, int[segments], uniform over divisions."""
    order = jax.random.permutation(key, items - 1)
    drawn = order[: segments - 1]
    cuts = jnp.sort(drawn) + 1
    return jnp.diff(cuts, prepend=0, append=items)
