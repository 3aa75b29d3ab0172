"""Memory that training takes beyond dense Adam: in the optimizer's state, and for a step while it runs.

Arrays of the state that grow with the weights count; scalars (counts, targets, sizes) do not.
"""

from typing import Any

import jax

from benchmarks.compiled import loops_and_branches
from benchmarks.models import TRAINED, Model
from benchmarks.report import Row
from benchmarks.training import METHODS, Method, compiled_step

ROUNDS = 2  # nothing is timed
COLUMNS = (
    'bits per pruned weight in the state',
    'temporary bytes per parameter beyond dense',
    'loops and branches beyond dense',
)


def run(size: str, rounds: int) -> list[Row]:
    """Compiles the steps of each model."""
    del rounds
    rows = []
    for title, model in TRAINED[size].items():
        rows += _rows(title, model)
    return rows


def _rows(title: str, model: Model) -> list[Row]:
    params = jax.eval_shape(model.init)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    dense_temporary, dense_loops = _program(model, params, METHODS['dense'])
    rows = []
    for name, method in METHODS.items():
        if method.pruner is None:
            continue
        temporary, loops = _program(model, params, method)
        beyond_dense = (temporary - dense_temporary) / parameters
        values = (_state_bits(params, method), beyond_dense, loops - dense_loops)
        rows.append(Row(f'{title}: {name}', values))
    return rows


def _program(model: Model, params: Any, method: Method) -> tuple[int, int]:
    """Temporary bytes of a compiled step, and its number of loops and branches."""
    opt_state = jax.eval_shape(method.optimizer().init, params)
    batch = jax.eval_shape(model.batch)
    compiled = compiled_step(model, method).lower(params, opt_state, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes, loops_and_branches(compiled.as_text())


def _state_bits(params: Any, method: Method) -> float:
    """Bits for each weight that has a mask, in what the state holds beyond the inner optimizer's."""
    state = jax.eval_shape(method.optimizer().init, params)
    own = jax.tree.leaves(state._replace(inner_state=None))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in own if leaf.ndim)
    masked = jax.tree.map(
        lambda mask, param: 0 if mask is None else param.size,
        state.masks,
        params,
        is_leaf=lambda leaf: leaf is None,
    )
    return 8 * held / sum(jax.tree.leaves(masked))
