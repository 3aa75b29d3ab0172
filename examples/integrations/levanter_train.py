"""Levanter: its trainer trains a pruned Llama, sharded over two devices. The lines that add pruning end in `# added`.

`bash run.sh integrations levanter` runs it in an environment of its own, with marin-levanter 0.2.227.
"""

import dataclasses
import pathlib
import tempfile

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample
from levanter.tracker.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import jaxpruner  # added

WINDOW = {'update_freq': 4, 'update_start_step': 0, 'update_end_step': 16}  # added
DENSE = {'embeddings/*': None, 'lm_head/*': None}  # added
LAYERS = {'stacked': 'transformer/layers/*', 'custom_sparsity_map': DENSE}  # added
CONFIG = {'sparsity': 0.75, **WINDOW, **LAYERS}  # added
STEPS, SAVED_AT = 24, 10
UP = 'transformer/layers/stacked/mlp/up_proj/weight/0'
TINY = LlamaConfig(
    max_seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    gradient_checkpointing=False,
)
Vocab, Batch = hax.Axis('vocab', 64), hax.Axis('batch', 8)


def new_model():
    return LlamaLMHeadModel.init(Vocab, TINY, key=jax.random.PRNGKey(0))


def batches():
    """Sentences that count in ones, twos, threes or fours."""
    for seed in range(STEPS):
        steps = np.random.default_rng(seed).integers(1, 5, (8, 1))
        tokens = hax.named((steps * np.arange(16) % 64).astype(np.int32), (Batch, TINY.max_Pos))
        yield hax.vmap(LmExample.causal, Batch)(tokens)


def loss_fn(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)


def train(pruner, folder, steps):
    config = TrainerConfig(
        id='tiny',
        num_train_steps=steps,
        train_batch_size=8,
        tracker=NoopConfig(),
        checkpointer=CheckpointerConfig(base_path=str(folder)),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
    with Trainer(config, tx, loss_fn) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(1), model_init=new_model)
        if state.step == 0:  # added: RigL starts sparse
            model = pruner.post_gradient_update(state.model, state.opt_state)  # added
            state = dataclasses.replace(state, model=model)  # added
        before = jaxpruner.summarize_sparsity(state.model)[UP]
        losses = []
        trainer.add_hook(lambda info: losses.append(float(info.loss)))
        state = trainer.train(state, list(batches())[int(state.step) :]).state
    return state, losses, before


def main(folder):
    for algorithm in 'magnitude', 'rigl':
        pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, **CONFIG})  # added
        state, losses, before = train(pruner, folder / algorithm, STEPS)
        metrics = jaxpruner.sparsity_metrics(state.opt_state, state.model)
        assert losses[-1] < losses[0]
        assert before == (0.75 if algorithm == 'rigl' else 0)
        assert metrics[UP] == 0.75
        assert metrics['_disagreement'] == 0
        mask, weight = (
            model.transformer.layers.stacked.mlp.up_proj.weight.array
            for model in (state.opt_state.masks, state.model)
        )
        assert mask.sharding.is_equivalent_to(weight.sharding, 3)
        assert not mask.sharding.is_fully_replicated
        print(f'{algorithm}: loss {losses[0]:.3f} -> {losses[-1]:.3f}')

    for steps in SAVED_AT, STEPS:  # of rigl
        resumed, *_ = train(pruner, folder / 'resumed', steps)
    trees = (resumed.model, resumed.opt_state), (state.model, state.opt_state)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *trees))
    print('resumed as undisturbed')

    def logits(model, tokens):
        return model(hax.named(tokens, (Batch, TINY.max_Pos)), AttentionMask.causal()).array

    tokens = jax.random.randint(jax.random.key(2), (8, 16), 0, 64)
    pruned, _ = jaxpruner.prune(new_model(), 0.5, 'wanda', apply_fn=logits, batches=[tokens])
    assert jaxpruner.summarize_sparsity(pruned)[UP] == 0.5
    leave = ['embeddings/*', '*/self_attn/*']  # what is cut are the units of MLPs
    small = jaxpruner.shrink((logits, new_model()), tokens, 'flops=0.8', leave=leave)
    _, weights = small.model
    units = weights.transformer.layers.stacked.mlp.up_proj.weight.array.shape[1]
    assert units < 64
    print(f'wanda: half of each kernel; shrunk: {units} of 64 units')


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 2)
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(folder))
