"""Flax linen: `TrainState` takes the wrapped optimizer as it is. The lines that add pruning end in `# added`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(32)(x)))


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        return optax.softmax_cross_entropy_with_integer_labels(
            state.apply_fn({'params': params}, x), y
        ).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)
    model = Network()
    params = model.init(jax.random.key(1), x)['params']
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    losses = []
    for _ in range(40):
        state, loss = train_step(state, x, y)
        losses.append(float(loss))
    assert losses[-1] < losses[0]

    sparsities = jaxpruner.summarize_sparsity(state.params)
    assert sparsities['Dense_0/kernel'] == sparsities['Dense_1/kernel'] == 0.75
    for name in ('Dense_0', 'Dense_1'):
        assert not state.params[name]['kernel'][state.opt_state.masks[name]['kernel'] == 0].any()
    print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}', sparsities)


if __name__ == '__main__':
    main()
