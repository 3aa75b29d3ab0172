"""Kauldron: a trainer's optimizer is any optax one, so only that line changes. Added lines end in `# added`.

`bash run.sh integrations` runs it in an environment of its own, with kauldron 1.4.4.
"""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from kauldron import kd

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added


class Network(nn.Module):
    x: kd.kontext.Key = 'batch.x'

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(32)(x)))


def examples():
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    return {'x': x, 'y': np.argmax(x[:, :4], axis=-1)[:, None].astype(np.int32)}


def main(workdir):
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    trainer = kd.train.Trainer(
        train_ds=kd.data.InMemoryPipeline(loader=examples, batch_size=32, shuffle=True),
        model=Network(),
        num_train_steps=40,
        train_losses={
            'loss': kd.losses.SoftmaxCrossEntropyWithIntLabels(logits='preds', labels='batch.y')
        },
        optimizer=pruner.wrap_optax(optax.adam(1e-2)),  # added: it was optax.adam(1e-2)
        writer=None,
        workdir=workdir,
    )
    state, _ = trainer.train()

    sparsities = jaxpruner.summarize_sparsity(state.params)
    assert sparsities['Dense_0/kernel'] == sparsities['Dense_1/kernel'] == 0.75
    masked = pruner.post_gradient_update(state.params, state.opt_state)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, masked, state.params))
    print(f'{int(state.step)} steps', sparsities)


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
