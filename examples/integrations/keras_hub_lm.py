"""Keras Hub: `fit` trains a GPT-2 whose layers lie on two devices. The lines that add pruning end in `# added`.

`Optax` of `keras_fit.py` gives `compile` an optax optimizer, pruned or not. `bash run.sh integrations keras-hub` runs
this in an environment of its own, with keras-hub 0.32.0.
"""

import os

os.environ['KERAS_BACKEND'] = 'jax'  # read when keras is imported

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import optax
from keras_fit import Optax

import jaxpruner  # added

WINDOW = {'update_freq': 4, 'update_start_step': 0, 'update_end_step': 16}  # added
DENSE = {'*_embedding/*': None, '*/bias': None}  # added: attention has biases of two axes
CONFIG = {'sparsity': 0.75, 'custom_sparsity_map': DENSE, **WINDOW}  # added
EPOCHS, SAVED_AT = 6, 3
UP = 'transformer_layer_0/feedforward_intermediate_dense/kernel'


def language_model():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=64,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=16,
        dropout=0,
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def values(model):
    return {variable.path: variable.value for variable in model.trainable_variables}


def pruned_model(algorithm):
    model = language_model()
    pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, **CONFIG})  # added
    optimizer = Optax(pruner.wrap_optax(optax.adam(1e-2)))  # added: it was Optax(optax.adam(1e-2))
    model.compile(optimizer=optimizer)
    optimizer.build(model.trainable_variables)
    first = pruner.post_gradient_update(values(model), optimizer.state)  # added: RigL starts sparse
    for variable in model.trainable_variables:  # added
        variable.assign(first[variable.path])  # added
    return model


def fit(model, **settings):
    """Sentences that count in ones, twos, threes or fours."""
    steps = np.random.default_rng(0).integers(1, 5, (32, 1))
    tokens = (steps * np.arange(17) % 64).astype(np.int32)
    inputs = {'token_ids': tokens[:, :-1], 'padding_mask': np.ones((32, 16), np.int32)}
    history = model.fit(inputs, tokens[:, 1:], batch_size=8, shuffle=False, verbose=0, **settings)
    return history.history['loss']


def main(folder):
    for algorithm in 'magnitude', 'rigl':
        model = pruned_model(algorithm)
        before = jaxpruner.summarize_sparsity(values(model))
        losses = fit(model, epochs=EPOCHS)
        state = model.optimizer.state
        metrics = jaxpruner.sparsity_metrics(state, values(model))
        assert losses[-1] < losses[0]
        assert before[UP] == (0.75 if algorithm == 'rigl' else 0)
        assert metrics[UP] == 0.75
        assert metrics['_disagreement'] == 0

        halfway = pruned_model(algorithm)
        fit(halfway, epochs=SAVED_AT)
        halfway.save_weights(folder / 'halfway.weights.h5')
        resumed = pruned_model(algorithm)
        resumed.load_weights(folder / 'halfway.weights.h5')
        assert resumed.optimizer.state.count == SAVED_AT * 4
        fit(resumed, epochs=EPOCHS, initial_epoch=SAVED_AT)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, values(resumed), values(model)))
        assert jax.tree.all(jax.tree.map(jnp.array_equal, resumed.optimizer.state, state))
        print(f'{algorithm}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; resumed as undisturbed')

    model = language_model()
    rest = [variable.value for variable in model.non_trainable_variables]

    def logits(weights, inputs):
        trainable = [weights[variable.path] for variable in model.trainable_variables]
        return model.stateless_call(trainable, rest, inputs)[0]

    inputs = {
        'token_ids': jnp.arange(128).reshape(8, 16) % 64,
        'padding_mask': jnp.ones((8, 16), jnp.int32),
    }
    weights = values(model)
    pruned, _ = jaxpruner.prune(weights, 0.5, 'wanda', apply_fn=logits, batches=[inputs])
    assert jaxpruner.summarize_sparsity(pruned)[UP] == 0.5
    leave = ['*_embedding/*', '*/self_attention/*']  # what is cut are the units of MLPs
    small = jaxpruner.shrink((logits, weights), inputs, 'flops=0.8', leave=leave)
    _, small_weights = small.model
    units = small_weights[UP].shape[1]
    assert units < 64
    print(f'wanda: half of each kernel; shrunk: {units} of 64 units')


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 2)
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1, 2), ('batch', 'model')))
    layout['.*feedforward_intermediate_dense.*kernel'] = (None, 'model')
    layout['.*feedforward_output_dense.*kernel'] = ('model', None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name='batch')
    )
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(folder))
