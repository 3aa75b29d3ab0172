"""Sparsity for JAX models: masks, schedules, selection, training, one-shot pruning.

The public names stand in `public_names.py`. They are loaded when one of them is first asked for, so that the command
line answers `--help` without loading JAX.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpruner.public_names import *  # noqa: F403 (what a type checker sees)
else:

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
        names = {} if is_special else vars(import_module(f'{__name__}.public_names'))
        public = {public: value for public, value in names.items() if not public.startswith('_')}
        if name == '__all__':
            return sorted(public)
        if name not in public:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        for public_name, value in public.items():
            globals().setdefault(public_name, value)  # what somebody assigned stays
        return public[name]

    def __dir__():
        return sorted({*globals(), *__getattr__('__all__')})
