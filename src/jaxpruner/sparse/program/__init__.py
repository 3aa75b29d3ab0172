"""The products of a traced model with its parameters, and the model with other products in their place.

A dense layer multiplies rows of data by a matrix that it reads from a leaf. It may read the leaf as it is, transposed,
reshaped, cast, or as one layer of a stack after the other. `Products` says which leaves are read so, in any
framework:

>>> import dataclasses, jax, jax.numpy as jnp
>>> from jaxpruner.sparse.program.models import Products
>>> def apply_fn(params, x):
...     hidden, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params['layers'])
...     return hidden @ params['out'].T + params['bias']
>>> params = {'layers': jnp.ones((3, 4, 4)), 'out': jnp.ones((2, 4)), 'bias': jnp.ones(2)}
>>> products = Products(apply_fn, params, jnp.ones((5, 4)))
>>> products.by_leaf['layers'].layers, products.by_leaf['out'].to_matrix(params['out']).shape
((3,), (4, 2))
>>> products.refused
{'bias': 'no contraction reads it'}

The model then runs with any object that has `multiply(rows, dtype)` in the place of a leaf. The arrays of the object
have the axes of `layers` in front. Inside the model it holds the arrays of one layer.

>>> @jax.tree_util.register_dataclass
... @dataclasses.dataclass
... class Halved:
...     matrix: jax.Array
...     def multiply(self, rows, dtype):
...         return rows @ self.matrix / 2
>>> out = Halved(products.by_leaf['out'].to_matrix(params['out']))
>>> weights = products.put(params, {'out': out})
>>> x = jnp.ones((7, 4))
>>> dense, halved = products.apply(params, x) - params['bias'], products.apply(weights, x) - params['bias']
>>> bool(jnp.allclose(halved, dense / 2))
True

The files:

    product_sites   one product of the program, perhaps a convolution: data become rows, and products become its result
    matrix_leaves   leaf -> matrix, and why a leaf is none
    models          `Products`; runs the program, with operators sliced along the trips of scans
"""
