"""Keras 3 on JAX, `compile` and `fit`: a Keras optimizer that holds an optax one, here a wrapped one.

`Optax` is all that is needed to give `Model.compile` any optax optimizer; pruning then adds what ends in `# added`.
"""

import os

os.environ['KERAS_BACKEND'] = 'jax'  # read when keras is imported

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


class Optax(keras.optimizers.Optimizer):
    """An optax optimizer, whose state lies in Keras variables: `fit` carries it as its own."""

    def __init__(self, tx, name='optax'):
        super().__init__(learning_rate=0.0, name=name)  # the learning rate is in `tx`
        self.tx = tx

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        leaves, self.treedef = jax.tree.flatten(self.tx.init(self._values(variables)))
        self.leaves = [
            self.add_variable(
                leaf.shape, lambda shape, dtype, leaf=leaf: leaf, leaf.dtype.name, name=f'state_{i}'
            )
            for i, leaf in enumerate(leaves)
        ]

    def apply(self, grads, trainable_variables=None):
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        names = [variable.path for variable in variables]
        params = self._values(variables)
        updates, state = self.tx.update(dict(zip(names, grads, strict=True)), self.state, params)
        params = optax.apply_updates(params, updates)
        for variable in variables:
            variable.assign(params[variable.path])
        for leaf, value in zip(self.leaves, jax.tree.leaves(state), strict=True):
            leaf.assign(value)
        self.iterations.assign_add(1)

    @property
    def state(self):
        return jax.tree.unflatten(self.treedef, [leaf.value for leaf in self.leaves])

    def _values(self, variables):
        return {variable.path: variable.value for variable in variables}


def main():
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    y = np.argmax(x[:, :4], axis=-1)
    hidden = keras.layers.Dense(32, activation='relu', name='hidden')
    model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(4, name='logits')])
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    optimizer = Optax(pruner.wrap_optax(optax.adam(1e-2)))  # added: it was Optax(optax.adam(1e-2))
    model.compile(
        optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses = model.fit(x, y, batch_size=32, epochs=20, verbose=0).history['loss']  # 40 steps
    assert losses[-1] < losses[0]

    for layer in model.layers:
        kernel = layer.kernel.value
        assert not kernel[optimizer.state.masks[layer.kernel.path] == 0].any()
        assert jnp.mean(kernel == 0) == 0.75
    print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}', jaxpruner.sparsity_metrics(optimizer.state))


if __name__ == '__main__':
    main()
