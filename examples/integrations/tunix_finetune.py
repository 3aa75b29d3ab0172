"""Tunix: its trainer fine-tunes a Gemma 3 on two devices. The lines that add pruning end in `# added`.

`bash run.sh integrations tunix` runs it in an environment of its own, with google-tunix 0.1.7.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer

import jaxpruner  # added

WINDOW = {'update_freq': 4, 'update_start_step': 0, 'update_end_step': 16}  # added
DENSE = {'embedder/*': None}  # added: the embedding is the last layer, too
CONFIG = {'sparsity': 0.75, 'custom_sparsity_map': DENSE, **WINDOW}  # added
STEPS, SAVED_AT = 24, 10
UP = 'layers/0/mlp/up_proj/kernel'
TINY = gemma3.ModelConfig(
    num_layers=1,
    num_embed=64,
    embed_dim=32,
    hidden_dim=64,
    num_heads=2,
    head_dim=16,
    num_kv_heads=1,
    sliding_window_size=8,
    param_dtype=jnp.float32,
)


@nnx.jit
def sharded_model():
    model = gemma3.Gemma3(TINY, rngs=nnx.Rngs(0))
    for layer in model.layers:  # Tunix makes these of zeros, for a checkpoint to fill
        for key, name in enumerate(('gate_proj', 'up_proj', 'down_proj')):
            kernel = getattr(layer.mlp, name).kernel
            kernel[...] = jax.random.normal(jax.random.key(key), kernel.shape) / 8
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def training_input(batch):
    length = batch.input_tokens.shape[1]
    return {
        'input_tokens': batch.input_tokens,
        'input_mask': batch.input_mask,
        'positions': jnp.broadcast_to(jnp.arange(length), (8, length)),
        'attention_mask': jnp.broadcast_to(jnp.tri(length, dtype=bool), (8, length, length)),
    }


def batches():
    """Sentences that count in ones, twos, threes or fours."""
    for seed in range(STEPS):
        steps = np.random.default_rng(seed).integers(1, 5, (8, 1))
        tokens = (steps * np.arange(16) % 64).astype(np.int32)
        yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


def train(pruner, steps, folder=None):
    model = sharded_model()
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=STEPS, max_steps=steps, checkpoint_root_directory=folder
    )
    trainer = peft_trainer.PeftTrainer(model, tx, config).with_gen_model_input_fn(training_input)
    weights = nnx.state(model, nnx.Param)  # added
    nnx.update(model, pruner.post_gradient_update(weights, trainer.optimizer.opt_state))  # added
    before = jaxpruner.summarize_sparsity(nnx.state(model, nnx.Param))['_total_sparsity']
    trainer.train(batches())
    losses = trainer.metrics_logger.get_metric_history('', 'loss', 'train')
    return model, trainer.optimizer, losses, before


def main():
    for algorithm in 'magnitude', 'rigl':
        pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, **CONFIG})  # added
        model, optimizer, losses, before = train(pruner, STEPS)
        metrics = jaxpruner.sparsity_metrics(optimizer.opt_state, nnx.state(model, nnx.Param))
        assert losses[-1] < losses[0]
        assert (before > 0.5) == (algorithm == 'rigl')
        assert metrics[UP] == 0.75
        assert metrics['_disagreement'] == 0
        kernel = model.layers[0].mlp.up_proj.kernel
        mask = optimizer.opt_state.masks['layers'][0]['mlp']['up_proj']['kernel']
        assert mask.sharding.is_equivalent_to(kernel.sharding, 2)
        assert not mask.sharding.is_fully_replicated

        with tempfile.TemporaryDirectory() as folder:
            train(pruner, SAVED_AT, folder)
            resumed = train(pruner, STEPS, folder)
        states = nnx.state((model, optimizer)), nnx.state(resumed[:2])
        assert jax.tree.all(jax.tree.map(jnp.array_equal, *states))
        print(f'{algorithm}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; resumed as undisturbed')

    inputs = training_input(next(batches()))
    data = inputs['input_tokens'], inputs['positions'], inputs['attention_mask']

    def logits(model, tokens, positions, attention_mask):
        return model(tokens, positions, None, attention_mask)[0]

    pruned, _ = jaxpruner.prune(sharded_model(), 0.5, 'wanda', apply_fn=logits, batches=[data])
    assert jaxpruner.summarize_sparsity(nnx.state(pruned, nnx.Param))[UP] == 0.5
    leave = ['embedder/*', '*/attn/*']  # what is cut are the units of MLPs
    small = jaxpruner.shrink(model, data, 'flops=0.8', call=logits, leave=leave)
    units = small.model.layers[0].mlp.up_proj.kernel.shape[1]
    assert units < 64
    print(f'wanda: half of each kernel; shrunk: {units} of 64 units')


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 1), ('fsdp', 'tp'))
    with mesh:  # `jax.set_mesh`, which replaces it, is not where Tunix looks
        main()
