"""The Python that the JAX-Pruning document prints runs as printed, and its strategies do what it says of them."""

import ast
import re
import textwrap
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jaxpruner
from helpers import seed_documents

pytestmark = seed_documents.needs_documents

# Unlike other documents, this one indents fences, and opens one twice.
_BLOCK = re.compile(r'^[ ]*```python\n(?:```python\n)?(.*?)^[ ]*```', re.DOTALL | re.MULTILINE)
TRAINING, STRATEGIES, CALLS, MODELS, LOOP = 1, 4, 4, 2, 1


NAMES = """
    pruning pruning_apply prune_act_unstruct puning_act_unstruct prune_act_struct pruning_act_struct
""".split()


def document():
    return seed_documents.find('# Weight Pruning', '```python')


def blocks():
    return [textwrap.dedent(block) for block in _BLOCK.findall(document())]


def holding(phrase):
    return [block for block in blocks() if phrase in block]


def calls():
    """The blocks that prune `x` with one call."""
    return [block for block in blocks() if block.startswith(('x = ', '# 0 <'))]


def strategies(text):
    """Every assignment of a strategy in a text whose lines may have lost their indentation."""
    found = []
    for start in re.finditer(r'^pruning_strategy = (?=\{)', text, re.MULTILINE):
        rest = text[start.end() :]
        for length in (match.end() for match in re.finditer(r'\}', rest)):
            try:
                found.append(ast.literal_eval(rest[:length]))
            except SyntaxError:
                continue
            break
    return found


def test_the_number_of_snippets():
    assert len(blocks()) == TRAINING + STRATEGIES + CALLS + MODELS + LOOP
    assert len(holding('# Training')) == TRAINING
    assert len(holding('pruning_strategy = {')) == STRATEGIES
    assert len(calls()) == CALLS
    assert len(holding('class CNN')) == MODELS
    assert len(holding('for epoch in')) == LOOP


@pytest.fixture(scope='module')
def images():
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 1)), jnp.float32)


@pytest.fixture
def names(images):
    """What the snippets take as given."""
    return {
        'nn': nn,
        'jax': jax,
        'x': images,
        'density': 0.5,
        'sparsity_pattern': (1, 4),
        **{name: getattr(jaxpruner, name) for name in NAMES},
    }


def make_state(names, model, images):
    exec(model, names)
    cnn = names['CNN']()
    variables = cnn.init(jax.random.key(0), images)
    tx = optax.sgd(0.1)
    return train_state.TrainState.create(apply_fn=cnn.apply, params=variables['params'], tx=tx)


# Of the document's examples: the density of the kernels after each epoch, or of one kernel.
EXPECTED = [
    {1: {'_all': 0.9}},
    {10: {'_each': 0.5}},
    {10: {'_each': 0.5}, 20: {'_each': 0.25}},
    {
        10: {
            'Dense_0/kernel': 0.9,
            'Dense_1/kernel': 0.8,
            'Conv_0/kernel': 1.0,
            'Conv_1/kernel': 1.0,
        }
    },
]


def kernel_densities(params):
    flat = jaxpruner.summarize_sparsity(params)
    return {name: 1 - value for name, value in flat.items() if name.endswith('kernel')}


@pytest.mark.parametrize('number', range(STRATEGIES))
@pytest.mark.filterwarnings(
    'ignore:.*Dense_1-kernel has length 10 along axis -1, which m=4:UserWarning'
)
def test_each_strategy_as_printed(names, images, number):
    exec(holding('pruning_strategy = {')[number], names)
    state, mask_key = make_state(names, holding('nn.Dense(features=10)')[0], images), None
    epochs = []
    for epoch in range(1, 25):
        updated, mask_key = jaxpruner.pruning(
            state, epoch, mask_key=mask_key, prune_strategy=names['pruning_strategy']
        )
        state, mask_key = jaxpruner.pruning_apply(state, mask_key)
        if not updated:
            continue
        epochs.append(epoch)
        densities, expected = kernel_densities(state.params), EXPECTED[number][epoch]
        sizes = {name: state.params[name.split('/')[0]]['kernel'].size for name in densities}
        if '_all' in expected:
            total = sum(densities[name] * sizes[name] for name in sizes)
            assert round(total) == round(sum(sizes.values()) * expected['_all'])
        for name, density in densities.items():
            wanted = expected.get(name, expected.get('_each'))
            # The last group of the 10-wide layer keeps 2 or 1 of its 2 weights.
            partial = (
                {0.5: 6, 0.25: 3}.get(wanted or 0.0, 0) / 10 if name == 'Dense_1/kernel' else None
            )
            if '_each' in expected:
                assert density == pytest.approx(partial or wanted)
            elif wanted is not None:
                assert density == pytest.approx(wanted, abs=0.5 / sizes[name])
    assert epochs == list(EXPECTED[number])


@pytest.mark.parametrize('number', range(CALLS))
def test_each_call_as_printed(names, images, number):
    snippet = calls()[number]
    names['x'] = jnp.repeat(images, 4, axis=-1)
    exec(snippet, names)
    assert (
        names['puning_act_unstruct'] is names['prune_act_unstruct']
    )  # a spelling that stands in its text alone
    kept = {'density)': 0.5, '0.9)': 0.9, 'sparsity_pattern)': 0.25, '(2, 4))': 0.5}
    share = next(share for end, share in kept.items() if snippet.rstrip().endswith(end))
    assert [int((x != 0).sum()) for x in names['x']] == [round(8 * 8 * 4 * share)] * 4


@pytest.mark.parametrize('number', range(MODELS))
def test_each_model_as_printed(names, images, number):
    state = make_state(names, holding('class CNN')[number], images)
    out, seen = state.apply_fn({'params': state.params}, images, capture_intermediates=True)
    assert out.shape[0] == len(images)
    assert jnp.all(jnp.isfinite(out))
    assert set(seen['intermediates']) > {'Conv_0', 'Conv_1'}


@pytest.mark.filterwarnings(
    'ignore:.*Dense_1-kernel has length 10 along axis -1, which m=4:UserWarning'
)
@pytest.mark.parametrize('strategy', [0, 2])
def test_the_training_loop_as_printed(names, images, strategy):
    """The fence that is opened twice, and the loop around it, with the functions of flax's example."""
    exec(holding('pruning_strategy = {')[strategy], names)
    state = make_state(names, holding('nn.Dense(features=10)')[0], images)
    labels = jnp.arange(4)

    @jax.jit
    def apply_model(state, images, labels):
        def loss_fn(params):
            logits = state.apply_fn({'params': params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return grads, loss, jnp.mean(logits.argmax(-1) == labels)

    def train_epoch(state, dataset, batch_size, key):
        del batch_size, key
        grads, loss, accuracy = apply_model(state, dataset['image'], dataset['label'])
        return state.apply_gradients(grads=grads), loss, accuracy

    dataset = {'image': images, 'label': labels}
    names |= {
        'state': state,
        'mask_key': None,
        'rng': jax.random.key(1),
        'config': types.SimpleNamespace(num_epochs=21, batch_size=4),
        'train_epoch': train_epoch,
        'apply_model': lambda state, images, labels: apply_model(state, images, labels),
        'train_ds': dataset,
        'test_ds': dataset,
        'epoch': 0,
    }
    exec(holding('for epoch in')[0], names)
    masks = names['mask_key']
    assert jnp.isfinite(names['test_loss'])
    assert kernel_densities(names['state'].params) == pytest.approx(
        {
            name: 1.0
            if masks[name[:-7]]['kernel'] is None
            else float(jnp.mean(masks[name[:-7]]['kernel'] != 0))
            for name in kernel_densities(names['state'].params)
        }
    )
    exec(holding('# Training')[0], names)


def test_the_strategies_of_the_page_without_indentation():
    page = seed_documents.find(
        'This is an implementation of Jax-based pruning module.', 'We use pruning_strategy\n'
    )
    printed = [
        ast.literal_eval(block.split('=', 1)[1].strip())
        for block in holding('pruning_strategy = {')
    ]
    assert len(strategies(page)) == STRATEGIES
    assert strategies(page) == printed
    for setting in printed:
        assert jaxpruner.PruningStrategy.parse(setting).epochs == tuple(setting)
