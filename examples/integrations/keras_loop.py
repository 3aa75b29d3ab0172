"""Keras 3 on JAX, its stateless interface and a loop of one's own. The lines that add pruning end in `# added`.

An ordinary such loop with an optax optimizer; `keras_fit.py` reaches `Model.fit`.
"""

import os

os.environ['KERAS_BACKEND'] = 'jax'  # read when keras is imported

import jax
import jax.numpy as jnp
import keras
import optax

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


def main():
    keras.utils.set_random_seed(0)
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)
    hidden = keras.layers.Dense(32, activation='relu', name='hidden')
    model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(4, name='logits')])
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    # Leaves of a dict have names, by which a configuration can choose; those of Keras's own list would be numbers.
    trainable = {variable.path: variable.value for variable in model.trainable_variables}
    non_trainable = [variable.value for variable in model.non_trainable_variables]
    opt_state = tx.init(trainable)

    @jax.jit
    def train_step(trainable, non_trainable, opt_state):
        def loss_fn(trainable):
            values = [trainable[variable.path] for variable in model.trainable_variables]
            logits, new = model.stateless_call(values, non_trainable, x, training=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (loss, non_trainable), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), non_trainable, opt_state, loss

    losses = []
    for _ in range(40):
        trainable, non_trainable, opt_state, loss = train_step(trainable, non_trainable, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    for variable in model.trainable_variables:
        variable.assign(trainable[variable.path])

    for layer in model.layers:
        kernel = layer.kernel.value
        assert not kernel[opt_state.masks[layer.kernel.path] == 0].any()
        assert jnp.mean(kernel == 0) == 0.75
    print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}', jaxpruner.summarize_sparsity(trainable))


if __name__ == '__main__':
    main()
