"""What packed files need beside the core: the extra `jaxpruner[checkpoint]`."""

from types import ModuleType


def checkpoints_for(name: str) -> ModuleType:
    """The package of checkpoints, for the function of this name.

    Raises:
      ImportError: a library is missing; the message says what to install.
    """
    try:
        from jaxpruner import checkpoints  # loads libraries that the core does without
    except ModuleNotFoundError as error:
        raise ImportError(
            f"sparse.{name} needs {error.name}, which is not installed: pip install 'jaxpruner[checkpoint]'"
        ) from error
    return checkpoints
