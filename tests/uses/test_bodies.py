"""Programs inside equations, as each version of JAX writes them."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.trace.program import inside
from uses.manual_meshes import abstract_mesh, partly_manual


@jax.custom_jvp
def forwards(x):
    return jnp.sin(x)


@jax.custom_vjp
def backwards(x):
    return jnp.sin(x)


forwards.defjvp(lambda x, dx: (forwards(*x), dx[0]))
backwards.defvjp(lambda x: (backwards(x), None), lambda _, dy: (dy,))

SPEC = jax.sharding.PartitionSpec('data')
SHARDED = partly_manual(jnp.sin, abstract_mesh(data=2), {'data'}, in_specs=(SPEC,), out_specs=SPEC)
FUNCTIONS = {
    'branches': lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
    'checkpoint': jax.checkpoint(jnp.sin),
    'custom_jvp': forwards,
    'custom_vjp': backwards,
    'jit': jax.jit(lambda x: jnp.sin(x) + 1),
    'scan': lambda x: jax.lax.scan(lambda carry, y: (carry + y, y), x[0], x)[0],
    'shard_map': SHARDED,
    'while': lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, jnp.cos, x),
}


def equation_of(function):
    """The equation with a program inside it."""
    equations = jax.make_jaxpr(lambda x: function(x))(jnp.ones(4)).eqns
    (equation,) = [equation for equation in equations if inside(equation) is not None]
    return equation


@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_primitive_that_is_written_in_an_unknown_way_is_named_with_the_version_of_jax(name):
    equation = equation_of(FUNCTIONS[name])
    unknown = equation.replace(params={f'new_{key}': x for key, x in equation.params.items()})
    message = rf'JAX {jax.__version__} writes {equation.primitive.name} \(.*test_bodies\.py'
    with pytest.raises(NotImplementedError, match=message):
        inside(unknown)
