"""Flax NNX: `nnx.Optimizer` takes the wrapped optimizer as it is. The lines that add pruning end in `# added`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.second = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)
    model = Network(nnx.Rngs(0))
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    losses = [float(train_step(model, optimizer, x, y)) for _ in range(40)]
    assert losses[-1] < losses[0]

    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    sparsities = jaxpruner.summarize_sparsity(params)
    assert sparsities['first/kernel'] == sparsities['second/kernel'] == 0.75
    masks = nnx.to_pure_dict(optimizer.opt_state.masks)
    for name in ('first', 'second'):
        assert not params[name]['kernel'][masks[name]['kernel'] == 0].any()
    print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}', sparsities)


if __name__ == '__main__':
    main()
