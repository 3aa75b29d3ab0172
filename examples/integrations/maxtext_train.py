"""MaxText: its training loop trains a pruned decoder, sharded over two devices. Added lines end in `# added`.

In a copy of MaxText two lines of `maxtext/utils/train_utils.py` change, as docs/integrations.md shows. This script runs
the package as it is installed, and puts its own optimizer and state in their place. `bash run.sh integrations maxtext`
runs it in an environment of its own, with maxtext 0.2.5.
"""

import os

os.environ['DECOUPLE_GCLOUD'] = 'TRUE'  # read when MaxText is imported: no Google Cloud

import json
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import maxtext
from flax import nnx
from maxtext.common import train_state_nnx
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import model_creation_utils, train_utils

import jaxpruner  # added

WINDOW = {'update_freq': 4, 'update_start_step': 0, 'update_end_step': 16}  # added
DENSE = {'token_embedder/*': None, 'decoder/logits_dense/*': None}  # added
LAYERS = {'stacked': 'decoder/layers/*', 'custom_sparsity_map': DENSE}  # added
CONFIG = {'sparsity': 0.75, **WINDOW, **LAYERS}  # added
STEPS, SAVED_AT = 24, 10
UP = 'decoder/layers/mlp/wi_0/kernel'
SETTINGS = {
    'hardware': 'cpu',
    'skip_jax_distributed_system': True,
    'dataset_type': 'synthetic',
    'base_emb_dim': 32,
    'base_mlp_dim': 64,
    'base_num_decoder_layers': 2,
    'base_num_query_heads': 2,
    'base_num_kv_heads': 1,
    'head_dim': 16,
    'vocab_size': 64,
    'max_target_length': 16,
    'per_device_batch_size': 4,
    'dtype': 'float32',
    'attention': 'dot_product',
    'param_scan_axis': 0,  # so that `stacked` needs to name no axis
    'learning_rate': 0.01,
    'learning_rate_schedule_steps': STEPS,
    'enable_tensorboard': False,
    'async_checkpointing': False,
}
make_optimizer = optimizers.get_optimizer


class PrunedState(train_state_nnx.TrainStateNNX):
    pruner = None

    def __init__(self, model, optimizer):
        weights = nnx.state(model, nnx.Param)
        # RigL starts sparse.
        nnx.update(model, self.pruner.post_gradient_update(weights, optimizer.opt_state))  # added
        super().__init__(model, optimizer)


def configure(folder, **settings):
    defaults = pathlib.Path(maxtext.__file__).parent / 'configs' / 'base.yml'
    settings = {'run_name': 'tiny', 'base_output_directory': folder, **SETTINGS, **settings}
    pairs = [f'{name}={value}' for name, value in settings.items()]
    return train.initialize(['', str(defaults), *pairs])


def run(pruner, function, folder, **settings):
    def get_optimizer(*args, **kwargs):
        return pruner.wrap_optax(make_optimizer(*args, **kwargs))  # added

    PrunedState.pruner = pruner
    with (
        mock.patch.object(optimizers, 'get_optimizer', get_optimizer),
        mock.patch.object(train_state_nnx, 'TrainStateNNX', PrunedState),
    ):
        return function(*configure(folder, **settings))


def weights_of(state):
    return nnx.filter_state(state['model'], nnx.Param)


def main(folder):
    for algorithm in 'magnitude', 'rigl':
        pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, **CONFIG})  # added
        alone = {'steps': STEPS, 'enable_checkpointing': False}
        *_, first = run(pruner, train_utils.setup_train_loop, folder, **alone)
        before = jaxpruner.summarize_sparsity(weights_of(nnx.state(first)))
        assert before[UP] == (0.75 if algorithm == 'rigl' else 0)

        log = folder / f'{algorithm}.jsonl'
        state = run(pruner, train.train_loop, folder, metrics_file=log, **alone)
        losses = [json.loads(line)['learning/loss'] for line in log.read_text().splitlines()]
        assert losses[-1] < losses[0]
        opt_state = state['optimizer']['opt_state']
        metrics = jaxpruner.sparsity_metrics(opt_state, weights_of(state))
        assert metrics[UP] == 0.75
        assert metrics['_disagreement'] == 0
        (pruned,) = jaxpruner.sparse_states(opt_state)
        mask, kernel = (
            tree['decoder']['layers']['mlp']['wi_0']['kernel']
            for tree in (pruned.masks, state['model'])
        )
        assert mask.sharding.is_equivalent_to(kernel.sharding, 3)
        assert not mask.sharding.is_fully_replicated

        for steps in SAVED_AT, STEPS:
            resumed = run(pruner, train.train_loop, folder / algorithm, steps=steps)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, resumed, state))
        print(f'{algorithm}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; resumed as undisturbed')

    config, _ = configure(folder)
    model = model_creation_utils.from_config(config, rngs=nnx.Rngs(0))
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 0, 64)
    data = tokens, jnp.broadcast_to(jnp.arange(16), (8, 16))

    def logits(weights, tokens, positions):
        return nnx.merge(graph, weights, rest)(tokens, positions, enable_dropout=False)

    pruned, _ = jaxpruner.prune(weights, 0.5, 'wanda', apply_fn=logits, batches=[data])
    assert jaxpruner.summarize_sparsity(pruned)[UP] == 0.5
    leave = ['token_embedder/*', '*/self_attention/*']  # what is cut are the units of MLPs
    small = jaxpruner.shrink((logits, weights), data, 'flops=0.8', leave=leave)
    units = small.model[1]['decoder']['layers']['mlp']['wi_0']['kernel'].shape[2]
    assert units < 64
    print(f'wanda: half of each kernel; shrunk: {units} of 64 units')


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 2)
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(folder))
