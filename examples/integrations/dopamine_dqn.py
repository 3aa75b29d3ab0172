"""Dopamine: its JAX DQN agent on CartPole with a pruned Q-network. The lines that add pruning end in `# added`.

`bash run.sh integrations` runs it in an environment of its own, with dopamine-rl 4.1.2, tfp-nightly and tensorboard.
"""

# ruff: noqa: E402
import sys
import types

# Dopamine's Atari module imports this archived package, of which the JAX agents use nothing; not for pruning's sake.
for name in ('baselines', 'baselines.common', 'baselines.common.atari_wrappers'):
    sys.modules[name] = types.ModuleType(name)
sys.modules['baselines.common'].atari_wrappers = sys.modules['baselines.common.atari_wrappers']

import gin
import gymnasium
import jax
import jax.numpy as jnp
from dopamine.jax import networks
from dopamine.jax.agents.dqn import dqn_agent

import jaxpruner  # added

SCHEDULE = {'update_freq': 10, 'update_start_step': 0, 'update_end_step': 50}  # added
CONFIG = {'algorithm': 'magnitude', 'sparsity': 0.9, **SCHEDULE}  # added

SETTINGS = """
ReplayBuffer.max_capacity = 1000
ReplayBuffer.batch_size = 32
ClassicControlDQNNetwork.hidden_units = 64
create_optimizer.learning_rate = 0.001
"""


class PrunedDQNAgent(dqn_agent.JaxDQNAgent):  # added
    def _build_networks_and_optimizer(self):  # added
        super()._build_networks_and_optimizer()  # added
        self.pruner = jaxpruner.create_updater_from_config(CONFIG)  # added
        self.optimizer = self.pruner.wrap_optax(self.optimizer)  # added
        self.optimizer_state = self.optimizer.init(self.online_params)  # added


def main():
    gin.parse_config(SETTINGS)
    env = gymnasium.make('CartPole-v1')
    agent = PrunedDQNAgent(  # added: it was dqn_agent.JaxDQNAgent
        num_actions=int(env.action_space.n),
        observation_shape=env.observation_space.shape,
        observation_dtype=jnp.float32,
        stack_size=1,
        network=networks.ClassicControlDQNNetwork,
        min_replay_history=100,
        update_period=1,
        target_update_period=20,
        seed=0,
    )
    episodes = 0
    while agent.training_steps < 300:
        action = agent.begin_episode(env.reset(seed=episodes)[0])
        ended = truncated = False
        while not (ended or truncated):
            observation, reward, ended, truncated, _ = env.step(int(action))
            if not (ended or truncated):
                action = agent.step(reward, observation)
        agent.end_episode(reward, terminal=ended)
        episodes += 1

    assert int(agent.optimizer_state.count) > 60
    sparsities = jaxpruner.summarize_sparsity(agent.online_params)
    assert (
        sparsities['params/layers_0/kernel'] == 0.8984375
    )  # the nearest that 4 x 64 weights can have: 230 of 256
    masked = agent.pruner.post_gradient_update(agent.online_params, agent.optimizer_state)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, masked, agent.online_params))
    print(f'{episodes} episodes, {int(agent.optimizer_state.count)} updates', sparsities)


if __name__ == '__main__':
    main()
