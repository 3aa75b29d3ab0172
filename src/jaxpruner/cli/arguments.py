"""Types of arguments, with the words that --help shows for their values."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

WorkloadName = Annotated[str, Positional, arg(metavar='WORKLOAD')]
CheckpointPath = Annotated[Path, Positional, arg(metavar='CHECKPOINT')]
PackedPath = Annotated[Path, Positional, arg(metavar='PACKED')]
Folders = Annotated[tuple[Path, ...], Positional, arg(metavar='FOLDERS')]

OptionalName = Annotated[str | None, arg(metavar='NAME')]
OptionalShare = Annotated[float | None, arg(metavar='SHARE')]
OptionalObject = Annotated[str | None, arg(metavar='MODULE:NAME')]
OptionalPath = Annotated[Path | None, arg(metavar='PATH')]

Names = Annotated[tuple[str, ...], arg(metavar='NAME …')]
Modules = Annotated[tuple[str, ...], arg(metavar='MODULE …')]
Settings = Annotated[tuple[str, ...], arg(metavar='KEY=VALUE …')]
Types = Annotated[tuple[str, ...], arg(metavar='NAME=TYPE …')]
Shares = Annotated[tuple[float, ...], arg(metavar='SHARE …')]
Numbers = Annotated[tuple[int, ...], arg(metavar='NUMBER …')]
