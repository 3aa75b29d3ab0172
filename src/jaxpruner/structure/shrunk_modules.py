"""Makes a module with smaller arrays, and checks that its own code follows them.

A module's code may hold widths as numbers: `x.reshape(n, self.num_heads, -1)`. It may also compute numbers from its new
widths where the zeroed model has the old ones, such as the mean of a LayerNorm. So the module runs on the inputs, and
has to give what the whole module gives with zeros at the removed channels. If it does not, the numbers that it holds
are set to the new widths.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.structure import held_numbers
from jaxpruner.structure.cutting import verifying
from jaxpruner.structure.cutting.keeping import KeepByGroup
from jaxpruner.structure.cutting.small_model import SmallApply
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.held_numbers import HeldNumber
from jaxpruner.structure.modules import ModelArrays
from jaxpruner.tree import PyTree

_MOST_NUMBERS = 6  # in a message


class _Trial(NamedTuple):
    """A module with smaller arrays that was run.

    Attributes:
      numbers: that were set on it.
      error: the largest difference from the results of the zeroed module; infinite if it does not run.
      fault: what is wrong; empty if the results are the same.
    """

    numbers: Sequence[HeldNumber]
    error: float
    fault: str


class ShrunkModules:
    """Modules with smaller arrays, run on the inputs of a graph.

    Args:
      arrays: of the whole module.
      graph: of the whole module.
    """

    def __init__(self, arrays: ModelArrays, graph: ChannelGraph):
        self._arrays = arrays
        self._graph = graph
        self._whole = [arrays.params] if arrays.state is None else [arrays.params, arrays.state]

    def numbers(self, keep: KeepByGroup, allow_inexact: bool) -> Sequence[HeldNumber]:
        """The numbers that have to be set on the smaller module.

        Raises:
          ValueError: its code does not follow the arrays. If inexact groups are allowed, it is enough that it runs.
        """
        trial = self._best_trial(keep)
        if trial.fault and not (allow_inexact and trial.error < math.inf):
            raise ValueError(self._refusal(keep, trial))
        return trial.numbers

    def module(self, keep: KeepByGroup, numbers: Sequence[HeldNumber]) -> Any:
        """The module with smaller arrays and these numbers."""
        return self._make(numbers, *self._shrink_each(keep))

    def _make(self, numbers: Sequence[HeldNumber], params: PyTree, state: PyTree = None) -> Any:
        module = self._arrays.make(params, state)
        return held_numbers.set_in(module, type(module), self._arrays.submodules, numbers)

    def _shrink_each(self, keep: KeepByGroup) -> list[PyTree]:
        graph = self._graph
        return [graph.shrink(tree, keep, allow_inexact=True, verify=False) for tree in self._whole]

    def _run(self, apply: Callable[..., Any], trees: Sequence[PyTree]) -> Any:
        with jax.default_matmul_precision('highest'):
            return jax.jit(apply)(*trees, *self._arrays.inputs)

    def _apply_with(self, numbers: Sequence[HeldNumber]) -> Callable[..., Any]:
        def apply(params: PyTree, *arguments: Any) -> Any:
            state, inputs = self._arrays.split(arguments)
            return self._arrays.run(self._make(numbers, params, state), state, *inputs)

        return apply

    @functools.cached_property
    def _results(self) -> Any:
        return self._run(self._arrays.apply, self._whole)

    def _best_trial(self, keep: KeepByGroup) -> _Trial:
        """Sets no numbers if the module follows without, else those that change its program."""
        graph = self._graph
        zeroed = [graph.zeroed(tree, keep, allow_inexact=True) for tree in self._whole]
        small = self._shrink_each(keep)
        small_apply = SmallApply(graph, 0, keep, allow_inexact=True)
        expected = small_apply.cut_results(self._run(self._arrays.apply, zeroed))
        whole = small_apply.cut_results(self._results)
        precision = verifying.coarsest_precision(small_apply.program)

        def attempt(numbers: Sequence[HeldNumber]) -> _Trial:
            try:
                results = jax.tree.leaves(self._run(self._apply_with(numbers), small))
            except Exception as error:  # whatever the module's code raises
                first_line = str(error).partition('\n')[0]
                return _Trial(numbers, math.inf, f'{type(error).__name__}: {first_line}')
            shapes = [[array.shape for array in arrays] for arrays in (results, expected)]
            if shapes[0] != shapes[1]:
                return _Trial(numbers, math.inf, f'it returns {shapes[0]} instead of {shapes[1]}')
            comparison = verifying.compare(whole, expected, results, precision)
            fault = ''
            if comparison.verdict == 'different':
                fault = (
                    f'its results differ by {comparison.error:.3g} from those with zeros, which the removal changes '
                    f'by {comparison.change:.3g}'
                )
            return _Trial(numbers, comparison.error, fault)

        def program(numbers: Sequence[HeldNumber]) -> str:
            try:
                text = str(jax.make_jaxpr(self._apply_with(numbers))(*small, *self._arrays.inputs))
            except Exception:
                return ''
            return re.sub(r'0x[0-9a-f]+', '', text)

        unchanged = attempt(())
        numbers = [number for number in self._held(keep) if number.new is not None]
        if not unchanged.fault or not numbers:
            return unchanged
        best = min(attempt(numbers), unchanged, key=lambda trial: trial.error)
        if best is unchanged or best.error == math.inf:
            return best
        with_all = program(numbers)
        for kind in dict.fromkeys(number.kind for number in numbers):
            fewer = [number for number in numbers if number.kind != kind]
            if program(fewer) == with_all:
                numbers = fewer
        return best._replace(numbers=numbers)

    def _held(self, keep: KeepByGroup) -> list[HeldNumber]:
        module = self._make((), *self._whole)
        return held_numbers.find(self._graph, keep, self._arrays.submodules(module))

    def _refusal(self, keep: KeepByGroup, trial: _Trial) -> str:
        """Names the groups that the module's code does not follow. Those of repeated layers are tried together."""
        families: dict[str, dict[str, Any]] = {}
        for name, kept in keep.items():
            glob = re.sub(r'(?<![^/])\d+(?=/)', '*', name)
            families.setdefault(glob, {})[name] = kept
        faults = {}
        for glob, family in families.items():
            name = glob if len(family) > 1 else next(iter(family))
            fault = self._best_trial(family).fault
            if fault:
                faults[name] = f'{name}: {fault}{self._describe_held(family)}'
        if not faults:  # only together
            faults = dict.fromkeys(keep, f'{trial.fault}{self._describe_held(keep)}')
        lines = dict.fromkeys(faults.values())
        remedies = [
            f'leave={list(faults)} keeps these groups whole',
            'the pair (apply_fn, params) has no code of its own that has to follow',
        ]
        if trial.error < math.inf:
            remedies.append('allow_inexact=True takes the module as it is, to be trained on')
        module = self._make((), *self._whole)
        first = f'the code of {type(module).__name__} does not follow its smaller arrays'
        return '\n'.join([first, *lines, '; '.join(remedies)])

    def _describe_held(self, keep: KeepByGroup) -> str:
        numbers = sorted(self._held(keep), key=lambda number: len(number.module))
        texts = held_numbers.describe({number.name: (number.old, number.new) for number in numbers})
        if len(texts) > _MOST_NUMBERS:
            texts[_MOST_NUMBERS:] = [f'and {len(texts) - _MOST_NUMBERS} more']
        return f'; it holds {", ".join(texts)}' if texts else ''
