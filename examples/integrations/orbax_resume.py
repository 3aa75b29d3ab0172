"""Orbax: masks lie in the optimizer's state, so the usual checkpoint holds them. Added lines end in `# added`.

A training is saved halfway, while masks still change, and goes on from the files; it ends as the undisturbed one.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jaxpruner  # added

SCHEDULE = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 30}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added
CONFIG['use_packed_masks'] = True  # added: checkpoints hold masks at one bit per weight
STEPS, SAVED_AT = 40, 18


def main():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)
    keys = jax.random.split(jax.random.key(1))
    params = {
        'hidden': jax.random.normal(keys[0], (16, 32)) / 4,
        'logits': jax.random.normal(keys[1], (32, 4)) / 6,
    }
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    opt_state = tx.init(params)

    def loss_fn(params):
        logits = jax.nn.relu(x @ params['hidden']) @ params['logits']
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def train_step(params, opt_state):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return {'params': optax.apply_updates(params, updates), 'opt_state': opt_state}

    state = {'params': params, 'opt_state': opt_state}
    first_loss = loss_fn(params)
    target = jax.eval_shape(lambda state: state, state)
    with (
        tempfile.TemporaryDirectory() as folder,
        ocp.CheckpointManager(pathlib.Path(folder).absolute()) as manager,
    ):
        for step in range(STEPS):
            if step == SAVED_AT:
                manager.save(step, args=ocp.args.StandardSave(state))
            state = train_step(**state)
        manager.wait_until_finished()
        resumed = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))
    assert int(resumed['opt_state'].count) == SAVED_AT
    for _ in range(SAVED_AT, STEPS):
        resumed = train_step(**resumed)

    assert jax.tree.all(jax.tree.map(jnp.array_equal, resumed, state))
    assert loss_fn(resumed['params']) < first_loss
    sparsities = jaxpruner.summarize_sparsity(resumed['params'])
    assert sparsities['hidden'] == sparsities['logits'] == 0.75
    masked = pruner.post_gradient_update(resumed['params'], resumed['opt_state'])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, masked, resumed['params']))
    print('resumed and undisturbed training are equal', sparsities)


if __name__ == '__main__':
    main()
