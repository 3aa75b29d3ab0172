"""Qwix: training with quantised kernels, and quantising afterwards, keep zeros. Added lines end in `# added`.

`bash run.sh integrations tunix` runs it in the environment of Tunix, with qwix 0.1.8.
"""

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx

import jaxpruner  # added

WINDOW = {'update_freq': 5, 'update_start_step': 0, 'update_end_step': 20}  # added
CONFIG = {'sparsity': 0.75, **WINDOW}  # added
RULES = [qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)]


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def main():
    x = jax.random.normal(jax.random.key(0), (64, 16))
    y = jnp.argmax(x[:, :4], axis=-1)

    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.jit
    def train_step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for algorithm in 'magnitude', 'rigl':
        model = qwix.quantize_model(Network(nnx.Rngs(0)), qwix.QtProvider(RULES), x)
        pruner = jaxpruner.create_updater_from_config({'algorithm': algorithm, **CONFIG})  # added
        tx = pruner.wrap_optax(optax.adam(1e-2))  # added: it was optax.adam(1e-2)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        weights = nnx.state(model, nnx.Param)
        nnx.update(model, pruner.post_gradient_update(weights, optimizer.opt_state))  # added
        losses = [float(train_step(model, optimizer)) for _ in range(40)]
        weights = nnx.state(model, nnx.Param)
        assert losses[-1] < losses[0]
        assert jaxpruner.sparsity_metrics(optimizer.opt_state, weights)['_disagreement'] == 0
        assert jaxpruner.summarize_sparsity(weights)['up/kernel'] == 0.75
        print(f'{algorithm}, quantised: loss {losses[0]:.3f} -> {losses[-1]:.3f}')

    # A quantised product reads rounded kernels, which Wanda does not follow. It gets the model that is not quantised,
    # which has the same parameters.
    dense = Network(nnx.Rngs(0))
    graph, _, rest = nnx.split(dense, nnx.Param, ...)

    def apply_fn(weights, x):
        return nnx.merge(graph, weights, rest)(x)

    pruned, masks = jaxpruner.prune(weights, {'*': 0.875}, 'wanda', apply_fn=apply_fn, batches=[x])
    assert jaxpruner.summarize_sparsity(pruned)['up/kernel'] >= 0.875
    nnx.update(dense, pruned)
    quantised = qwix.quantize_model(dense, qwix.PtqProvider(RULES), x)
    for name in 'up', 'down':
        values = getattr(quantised, name).kernel.array.qvalue[...]
        assert values.dtype == jnp.int8
        assert not values[masks[name]['kernel'][...] == 0].any()

    small = jaxpruner.shrink(Network(nnx.Rngs(0)), x, 'flops=0.5').model
    quantised = qwix.quantize_model(small, qwix.PtqProvider(RULES), x)
    units = quantised.up.kernel.array.qvalue.shape[1]
    assert units < 64
    print(f'wanda: zeros stay zeros in int8; shrunk, then quantised: {units} of 64 units')


if __name__ == '__main__':
    main()
