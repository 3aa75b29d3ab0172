"""A model that reads its weights in many ways, and what goes into each of its layers, from NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.random_numbers import Normal

normal = Normal(1)

PARAMS = {
    'conv': normal(3, 2, 4, 8),
    'embedding': normal(5, 8),
    'fused': normal(8, 2, 8),
    'bias': normal(8),
    'stack': normal(3, 8, 8) / 2,
    'experts': normal(2, 8, 4),
    'out': normal(6, 4),  # outputs first
}
CONVOLUTION = {
    'window_strides': (2, 1),
    'padding': ((1, 2), (0, 1)),
    'rhs_dilation': (1, 2),
    'feature_group_count': 2,
    'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'),
}
BATCHES = [(normal(n, 6, 5, 8), jnp.asarray(normal.generator.integers(0, 5, n))) for n in (4, 4, 3)]


def apply(params, images, numbers):
    x = jax.lax.conv_general_dilated(images, params['conv'], **CONVOLUTION)
    x = x.reshape(len(x), -1, 8) + params['embedding'][numbers][:, None]
    first, second = jnp.split(params['fused'], 2, axis=1)
    x = jnp.tanh(x @ first[:, 0] / 4) + jnp.tanh(x @ second[:, 0] / 4) + params['bias']
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, params['stack'])
    x = jnp.einsum('ebti,eio->ebto', jnp.stack([x, x**2]), params['experts']).sum(0)
    return x @ params['out'].T


def windows(images):
    """`[groups, samples, inputs]` of the convolution, one window at a time."""
    padding, strides, dilation = (
        CONVOLUTION[name] for name in ('padding', 'window_strides', 'rhs_dilation')
    )
    padded = np.pad(images, ((0, 0), *padding, (0, 0)))
    height, width = 2 * dilation[0] + 1, dilation[1] + 1
    found = []
    for image in padded:
        for top in range(0, image.shape[0] - height + 1, strides[0]):
            for left in range(0, image.shape[1] - width + 1, strides[1]):
                window = image[top : top + height : dilation[0], left : left + width : dilation[1]]
                found.append([window[..., :4].ravel(), window[..., 4:].ravel()])
    return np.swapaxes(np.array(found), 0, 1)


def samples(params, batches=BATCHES):
    """For each leaf what it is multiplied with, `[…, samples, inputs]` in float64; layers one after another."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    found = {name: [] for name in ('conv', 'fused', 'stack', 'experts', 'out')}
    for images, numbers in batches:
        patches = windows(np.asarray(images, np.float64))
        found['conv'].append(patches)
        kernels = params['conv'].reshape(24, 2, 4)
        x = np.concatenate([patches[group] @ kernels[:, group] for group in (0, 1)], 1)
        x = x.reshape(len(images), -1, 8) + params['embedding'][np.asarray(numbers)][:, None]
        found['fused'].append(x.reshape(-1, 8))
        x = sum(np.tanh(x @ params['fused'][:, part] / 4) for part in (0, 1)) + params['bias']
        layers = []
        for kernel in params['stack']:
            layers.append(x.reshape(-1, 8))
            x = np.tanh(x @ kernel)
        found['stack'].append(np.array(layers))
        found['experts'].append(np.array([x, x**2]).reshape(2, -1, 8))
        found['out'].append((x @ params['experts'][0] + x**2 @ params['experts'][1]).reshape(-1, 4))
    return {name: np.concatenate(parts, -2) for name, parts in found.items()}
