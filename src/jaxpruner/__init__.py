"""Sparsity for JAX models: masks, schedules, selection, training, one-shot pruning.

Public are the names in `public_names.py` and what `algorithms` exports. They are loaded when one of them is first asked
for, so that the command line answers `--help` without loading JAX.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpruner.algorithms import *  # noqa: F403 (what a type checker sees)
    from jaxpruner.public_names import *  # noqa: F403
else:

    def _public_names():
        from importlib import import_module
        from types import ModuleType

        algorithms = vars(import_module(f'{__name__}.algorithms'))
        classes = {
            name: value for name, value in algorithms.items() if not isinstance(value, ModuleType)
        }
        names = classes | vars(import_module(f'{__name__}.public_names'))
        return {name: value for name, value in names.items() if not name.startswith('_')}

    def __getattr__(name):
        """Finds a module of the package, or a public name."""
        from importlib import import_module, util

        if name == '__version__':
            return import_module('importlib.metadata').version(__name__)
        is_special = name.startswith('__') and name != '__all__'
        if (
            not is_special
            and name.isidentifier()
            and util.find_spec(f'{__name__}.{name}') is not None
        ):
            return import_module(f'{__name__}.{name}')
        public = {} if is_special else _public_names()
        if name == '__all__':
            return sorted(public)
        if name not in public:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        for public_name, value in public.items():
            globals().setdefault(public_name, value)  # what somebody assigned stays
        return public[name]

    def __dir__():
        return sorted({*globals(), *__getattr__('__all__')})
