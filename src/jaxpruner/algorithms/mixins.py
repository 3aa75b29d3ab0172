"""What the mixins of pruners share."""

from jaxpruner.base_updater import BaseUpdater


def check_mixed_in_first(cls: type, mixin: type) -> None:
    """Refuses a class in which a mixin comes after the pruner, whose methods then hide those of the mixin."""
    bases = cls.__mro__
    if BaseUpdater in bases and bases.index(mixin) > bases.index(BaseUpdater):
        names = ', '.join(base.__name__ for base in cls.__bases__)
        raise TypeError(
            f'class {cls.__name__}({names}): {mixin.__name__} has no effect after a pruner; write it first, '
            f'class {cls.__name__}({mixin.__name__}, …)'
        )
