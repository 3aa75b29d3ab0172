"""FedJAX: federated averaging prunes the server's model. The lines that add pruning end in `# added`.

The wrapped optimizer is the server's. Clients begin each round with the pruned weights and send dense changes; the
server's update lands pruned weights on zero again.
"""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpruner  # added

jax.tree_map = (
    jax.tree.map
)  # FedJAX 0.0.17 calls it by a name that JAX has removed; not for pruning's sake

SCHEDULE = {'update_freq': 2, 'update_start_step': 0, 'update_end_step': 10}  # added: in rounds
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.75, **SCHEDULE}  # added
CLIENTS, ROUNDS = 6, 24


def client_data():
    random = np.random.default_rng(0)
    data = {}
    for client in range(CLIENTS):
        x = random.normal(size=(20, 16)).astype(np.float32)
        data[b'%d' % client] = {'x': x, 'y': np.argmax(x[:, :4], axis=-1)}
    return fedjax.InMemoryFederatedData(data)


def loss_fn(params, batch, rng):
    del rng
    logits = jax.nn.relu(batch['x'] @ params['hidden']) @ params['logits']
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['y']).mean()


def main():
    keys = jax.random.split(jax.random.key(1))
    params = {
        'hidden': jax.random.normal(keys[0], (16, 32)) / 4,
        'logits': jax.random.normal(keys[1], (32, 4)) / 6,
    }
    pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
    tx = pruner.wrap_optax(optax.sgd(1.0))  # added: it was optax.sgd(1.0)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        grad_fn=jax.grad(loss_fn),
        client_optimizer=fedjax.optimizers.sgd(learning_rate=0.1),
        server_optimizer=fedjax.optimizers.create_optimizer_from_optax(tx),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=10, seed=0),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(client_data(), num_clients=3, seed=0)
    examples = [dataset.all_examples() for _, dataset in client_data().clients()]
    everything = jax.tree.map(lambda *parts: jnp.concatenate(parts), *examples)
    first_loss = loss_fn(params, everything, None)

    state = algorithm.init(params)
    for _ in range(ROUNDS):
        state, _ = algorithm.apply(state, sampler.sample())
    last_loss = loss_fn(state.params, everything, None)
    assert last_loss < first_loss

    sparsities = jaxpruner.summarize_sparsity(state.params)
    assert sparsities['hidden'] == sparsities['logits'] == 0.75
    for name, mask in state.opt_state.masks.items():
        assert not state.params[name][mask == 0].any()
    print(f'loss {first_loss:.3f} -> {last_loss:.3f}', sparsities)


if __name__ == '__main__':
    main()
