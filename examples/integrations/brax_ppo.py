"""Brax: its PPO trains a pruned agent on two devices. The lines that add pruning end in `# added`.

PPO makes its optimizer by `optax.adam`, takes no other, and calls `update` without the parameters. Its checkpoints hold
parameters alone, no masks. The adapter `for_brax` is added, too. `bash run.sh integrations brax` runs this in an
environment of its own, with brax 0.14.2.
"""

import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from brax import envs
from brax.training.agents.ppo import checkpoint, losses
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo

import jaxpruner  # added

WINDOW = {'update_freq': 4, 'update_start_step': 0, 'update_end_step': 40}  # added
CONFIG = {'sparsity': 0.75, **WINDOW}  # added
adam = optax.adam


def for_brax(tx, start):
    """Makes an optimizer whose `update` needs no parameters, since its state holds a copy of them."""

    def update(updates, state, params=None):
        updates, inner = tx.update(updates, state[1], state[0])
        return updates, (optax.apply_updates(state[0], updates), inner)

    return optax.GradientTransformation(lambda params: (start, tx.init(start)), update)


def train(num_timesteps, **settings):
    return ppo.train(
        envs.get_environment('fast'),
        num_timesteps=num_timesteps,
        episode_length=100,
        num_envs=16,
        batch_size=16,
        num_minibatches=4,
        unroll_length=5,
        num_evals=2,
        num_eval_envs=8,
        learning_rate=1e-2,
        network_factory=small_networks,
        **settings,
    )


def small_networks(observation_size, action_size, **settings):
    sizes = {'policy_hidden_layer_sizes': (32, 32), 'value_hidden_layer_sizes': (32, 32)}
    return ppo_networks.make_ppo_networks(observation_size, action_size, **sizes, **settings)


def train_pruned(pruner, params, num_timesteps, **settings):
    """Goes on from parameters as Brax returns them and saves them."""
    start = losses.PPONetworkParams(policy=params[1], value=params[2])
    state = pruner.init_state(start)  # added
    start = pruner.post_gradient_update(start, state)  # added: RigL starts sparse

    def pruned_adam(learning_rate):  # added
        return for_brax(pruner.wrap_optax(adam(learning_rate)), start)  # added

    shares, rewards = [], []
    with mock.patch('optax.adam', pruned_adam):  # added
        _, params, _ = train(
            num_timesteps,
            restore_params=(params[0], start.policy, start.value),
            policy_params_fn=lambda step, make_policy, params: shares.append(kernels(params)),
            progress_fn=lambda step, metrics: rewards.append(metrics['eval/episode_reward']),
            **settings,
        )
    return params, shares, rewards


def kernels(params):
    """The share of zeros of each kernel."""
    sparsities = jaxpruner.summarize_sparsity({'policy': params[1], 'value': params[2]})
    return {name: share for name, share in sparsities.items() if name.endswith('kernel')}


def main():
    _, dense, _ = train(0)
    for algorithm in 'magnitude', 'rigl':
        pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, **CONFIG})  # added
        with tempfile.TemporaryDirectory() as folder:
            params, shares, rewards = train_pruned(pruner, dense, 2000, save_checkpoint_path=folder)
            (path,) = pathlib.Path(folder).iterdir()
            saved = checkpoint.load(path)
        assert rewards[-1] > rewards[0]
        assert set(shares[0].values()) == {0.75 if algorithm == 'rigl' else 0}
        assert set(shares[-1].values()) == {0.75}
        assert jax.tree.all(jax.tree.map(np.array_equal, tuple(saved[1:]), params[1:]))

        # To go on from a checkpoint, take the masks from the zeros, and keep them.
        masks = jaxpruner.masks_from_zeros(losses.PPONetworkParams(policy=saved[1], value=saved[2]))
        further, *_ = train_pruned(jaxpruner.FixedMask(masks), saved, 1000)
        again, *_ = train_pruned(jaxpruner.FixedMask(masks), params, 1000)
        assert kernels(further) == kernels(saved)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, further[1:], again[1:]))
        print(f'{algorithm}: reward {rewards[0]:.1f} -> {rewards[-1]:.1f}; resumed with its zeros')

    network = small_networks(2, 1).policy_network
    observations = jax.random.normal(jax.random.key(0), (64, 2))

    def logits(policy, observations):
        return network.apply(dense[0], policy, observations)

    pruned, _ = jaxpruner.prune(dense[1], 0.5, 'wanda', apply_fn=logits, batches=[observations])
    assert jaxpruner.summarize_sparsity(pruned)['params/hidden_1/kernel'] == 0.5
    small = jaxpruner.shrink((logits, dense[1]), observations, 'flops=0.5')
    _, small_policy = small.model
    units = small_policy['params']['hidden_0']['kernel'].shape[1]
    assert units < 32
    print(f'wanda: half of each kernel; shrunk: {units} of 32 units')


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 2)
    main()
