"""Equinox: the wrapped optimizer gets the model's arrays, as any. The lines that add pruning end in `# added`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


def main():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)
    model = eqx.nn.MLP(16, 4, width_size=32, depth=1, key=jax.random.key(1))
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def train_step(model, opt_state):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(40):
        model, opt_state, loss = train_step(model, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]

    sparsities = jaxpruner.summarize_sparsity(eqx.filter(model, eqx.is_array))
    assert sparsities['layers/0/weight'] == sparsities['layers/1/weight'] == 0.75
    for layer, mask in zip(model.layers, opt_state.masks.layers, strict=True):
        assert not layer.weight[mask.weight == 0].any()
    print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}', sparsities)


if __name__ == '__main__':
    main()
