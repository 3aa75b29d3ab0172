"""A recipe: every number of a training, as a frozen record that goes to TOML and back.

Sections are the tables of the file. What a file leaves out stays as in the preset it is read over; a key that does not
exist is refused with the nearest known one.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpruner.core import atomic_files, config_files
from jaxpruner.core import tree as tree_lib

Plain = str | bool | int | float | tuple


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer and its numbers; those that an optimizer does not know mean nothing to it.

    >>> Optimizer(name='adamw').momentum
    0.9
    """

    name: str = 'sgd'  # sgd, adam, adamw, adafactor
    learning_rate: float = 0.1  # after the warmup
    momentum: float = 0.9  # of sgd
    nesterov: bool = False  # of sgd
    beta2: float = 0.999  # of adam and adamw
    epsilon: float = 1e-8  # of adam and adamw: added to the root of the second moment
    weight_decay: float = (
        0.0  # sgd, adam: added to the gradient (L2); adamw, adafactor: apart from it
    )
    decay_kernels_only: bool = True  # weights with more than one dimension, not biases and norms
    clip_norm: float = 0.0  # of the whole gradient; 0 for no limit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate changes.

    >>> Schedule(decay='steps', boundaries=(0.5,)).factor
    0.1
    """

    warmup: float = 0.0  # share of the steps, linearly from 0
    decay: str = 'cosine'  # cosine (to 0), steps, constant, inverse_sqrt
    boundaries: tuple[float, ...] = ()  # of steps: shares of the steps
    factor: float = 0.1  # of steps: by which the rate is multiplied at each


@dataclasses.dataclass(frozen=True)
class Pruning:
    """When masks are updated, in shares of the steps, and how the sparsity is spread over the layers.

    >>> Pruning().distribution
    'uniform'
    """

    start: float = 0.2  # gradual pruning
    end: float = 0.75  # gradual pruning
    frequency: float = 0.025  # between two updates
    trainer_start: float = (
        0.0  # sparse trainers (static, SET, RigL), which are sparse from the beginning
    )
    trainer_end: float = 0.75
    ste_start: float = 0.0  # straight-through methods, whose weights come back at no cost
    ste_end: float = 0.75
    power: float = 3.0  # of the polynomial by which the sparsity grows
    drop_fraction: float = 0.3  # share of the kept weights that SET and RigL replace, at first
    distribution: str = 'uniform'  # uniform, erk
    sparsity_type: str = 'unstructured'  # or 2:4, block_4,4, …


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every number of a training.

    >>> recipe = Recipe(workload='resnet', model={'width': 16})
    >>> Recipe(workload='resnet', model={'width': 8}).updated(tomllib.loads(recipe.to_toml())) == recipe
    True
    """

    workload: str
    preset: str = 'default'
    data: str = 'digits'
    steps: int = 1000
    batch_size: int = 128
    eval_every: float = 0.1  # share of the steps
    dtype: str = 'float32'  # of the computation; parameters are float32
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    pruning: Pruning = Pruning()
    model: Mapping[str, Plain] = dataclasses.field(
        default_factory=dict
    )  # sizes, by the workload's own names
    task: Mapping[str, Plain] = dataclasses.field(
        default_factory=dict
    )  # other numbers, by the workload's own names

    def __post_init__(self):
        for field in ('steps', 'batch_size'):
            if getattr(self, field) < 1:
                raise ValueError(f'{field} must be at least 1, got {getattr(self, field)}')
        if not 0 < self.eval_every <= 1:
            raise ValueError(
                f'eval_every must lie in (0, 1] (a share of the steps), got {self.eval_every}'
            )
        if self.dtype not in ('float32', 'bfloat16'):
            raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")
        _check_shares(
            'pruning',
            self.pruning,
            'start end frequency trainer_start trainer_end ste_start ste_end',
        )
        _check_shares('schedule', self.schedule, 'warmup')

    def updated(self, changes: Mapping[str, Any], where: str = '') -> 'Recipe':
        """The recipe with other values.

        Args:
          changes: nested as the file: `{'steps': 10, 'optimizer': {'learning_rate': 0.1}}`.
          where: what an error begins with: the file's name.

        Raises:
          ValueError: an unknown key, a value of another type, or one that is out of range.

        >>> Recipe('resnet').updated({'optimizer': {'name': 'adam'}}).optimizer.name
        'adam'
        """
        start = f'{where}: ' if where else ''
        try:
            return _merged(self, changes, '')
        except (ValueError, TypeError) as error:
            raise ValueError(f'{start}{error}') from None

    def to_toml(self) -> str:
        """The recipe as a TOML file."""
        fields = dataclasses.asdict(self)
        lines = [
            f'{key} = {_toml(value)}'
            for key, value in fields.items()
            if not isinstance(value, Mapping)
        ]
        for name, table in fields.items():
            if isinstance(table, Mapping) and table:
                lines += [
                    '',
                    f'[{name}]',
                    *(f'{key} = {_toml(value)}' for key, value in table.items()),
                ]
        return '\n'.join(lines) + '\n'

    def digest(self) -> str:
        """The SHA-256 of the TOML file, in hexadecimal digits: two runs with the same one have the same numbers."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Writes the TOML file, which appears when it is whole.

        Args:
          path: of the file.
        """
        atomic_files.replace_file(path, lambda temporary: temporary.write_text(self.to_toml()))

    def share(self, share: float) -> int:
        """A share of the steps in whole steps.

        Args:
          share: in [0, 1].
        """
        return round(share * self.steps)


def read_recipe(path: Path, default: Recipe) -> Recipe:
    """Reads a TOML file over a default recipe.

    Args:
      path: a whole recipe, or only what differs from the default.
      default: says which keys there are and what those mean that the file leaves out.

    Raises:
      ValueError: no TOML, an unknown key, a value of another type, or another workload.
      FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Recipe('resnet', steps=7).write(Path(folder) / 'recipe.toml')
    ...     read_recipe(Path(folder) / 'recipe.toml', Recipe('resnet')).steps
    7
    """
    changes = config_files.read(path)
    if changes.get('workload', default.workload) != default.workload:
        raise ValueError(
            f'{path} is a recipe of the workload {changes["workload"]!r}, not of {default.workload!r}'
        )
    return default.updated(changes, str(path))


def parse_override(text: str) -> dict[str, Any]:
    """Reads `key=value` as `Recipe.updated` takes it.

    Args:
      text: the key with dots, the value as in TOML; a bare word is a string.

    Raises:
      ValueError: there is no `=`.

    >>> parse_override('optimizer.learning_rate=0.5')
    {'optimizer': {'learning_rate': 0.5}}
    """
    key, equals, value = text.partition('=')
    if not (equals and key.strip()):
        raise ValueError(f'{text!r} is no key=value, such as optimizer.learning_rate=0.1')
    try:
        parsed: Any = tomllib.loads(f'value = {value}')['value']
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(key.strip().split('.')):
        parsed = {part: parsed}
    return parsed


def _merged(old: Any, changes: Any, path: str) -> Any:
    """`old` with the changes, each of the type that is there."""
    if not isinstance(changes, Mapping):
        raise ValueError(f'{path} is a table of keys, got {changes!r}')
    known = (
        {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
        if _is_record(old)
        else dict(old)
    )
    for key, value in changes.items():
        name = f'{path}.{key}' if path else key
        if key not in known:
            raise ValueError(f'the recipe has no key {name!r}; {tree_lib.nearest(key, known)}')
        nested = _is_record(known[key]) or isinstance(known[key], Mapping)
        known[key] = (
            _merged(known[key], value, name) if nested else _converted(value, known[key], name)
        )
    return type(old)(**known) if _is_record(old) else known


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value)


_WORDS = {
    bool: 'true or false',
    int: 'a whole number',
    float: 'a number',
    str: 'a word',
    tuple: 'a list',
}


def _converted(value: Any, old: Any, name: str) -> Any:
    wanted = type(old)
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is int and type(value) is float and value.is_integer():
        value = int(value)  # steps are often written 4e5
    if wanted is tuple and isinstance(value, list | tuple):
        return tuple(value)
    if type(value) is not wanted:
        raise ValueError(f'{name} must be {_WORDS[wanted]}, got {value!r}')
    return value


def _check_shares(section: str, record: Any, names: str) -> None:
    for name in names.split():
        if not 0 <= getattr(record, name) <= 1:
            raise ValueError(
                f'{section}.{name} must lie in [0, 1] (a share of the steps), got {getattr(record, name)}'
            )


def _toml(value: Any) -> str:
    """A plain value as TOML writes it."""
    if isinstance(value, tuple | list):
        return f'[{", ".join(map(_toml, value))}]'
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
