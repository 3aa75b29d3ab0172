"""Programs inside equations, as each version of JAX writes them."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.trace.program import inside

FUNCTIONS = {
    'branches': lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
    'checkpoint': jax.checkpoint(jnp.sin),
    'jit': jax.jit(lambda x: jnp.sin(x) + 1),
    'scan': lambda x: jax.lax.scan(lambda carry, y: (carry + y, y), x[0], x)[0],
    'while': lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, jnp.cos, x),
}


@pytest.mark.parametrize('function', FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_primitive_that_is_written_in_an_unknown_way_is_named_with_the_version_of_jax(function):
    equations = jax.make_jaxpr(lambda x: function(x))(jnp.ones(4)).eqns
    (equation,) = [equation for equation in equations if inside(equation) is not None]
    unknown = equation.replace(params={f'new_{key}': x for key, x in equation.params.items()})
    message = rf'JAX {jax.__version__} writes {equation.primitive.name} \(.*test_bodies\.py'
    with pytest.raises(NotImplementedError, match=message):
        inside(unknown)
