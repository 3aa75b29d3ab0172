"""An operator that multiplies by the whole matrix, to be put in the place of a leaf."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    """A matrix `[*layers, inputs, outputs]`."""

    matrix: jax.Array

    def multiply(self, rows, result_dtype):
        return rows.astype(result_dtype) @ self.matrix


def dense_weights(products, params):
    """The parameters with `Dense` in the place of each leaf that is a matrix."""
    operators = {}
    for name, leaf in products.leaves(params).items():
        operators[name] = Dense(products.by_leaf[name].to_matrix(leaf))
    return products.put(params, operators)
