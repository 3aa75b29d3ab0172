"""Haiku: its parameters are a dict, so only the optimizer changes. The lines that add pruning end in `# added`."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


def main():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 4])(x)))
    params = model.init(jax.random.key(1), x)
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(40):
        params, opt_state, loss = train_step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]

    sparsities = jaxpruner.summarize_sparsity(params)
    assert sparsities['mlp/~/linear_0/w'] == sparsities['mlp/~/linear_1/w'] == 0.75
    for name, layer in params.items():
        assert not layer['w'][opt_state.masks[name]['w'] == 0].any()
    print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}', sparsities)


if __name__ == '__main__':
    main()
