"""A recipe: every number of a training, as a frozen record that goes to TOML and back. Presets are files of `presets/`.

Sections are the tables of the file. What a file leaves out stays as in the preset that it is read
over; an unknown key is refused, and the nearest known one is named.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpruner import api, checks
from jaxpruner import tree as tree_lib
from jaxpruner.files import atomic_files, input_files

Plain = str | bool | int | float | tuple


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer and its numbers; each optimizer ignores those of the others."""

    name: str = 'sgd'  # sgd, adam, adamw, adafactor
    learning_rate: float = 0.1  # after the warmup
    momentum: float = 0.9  # of sgd
    nesterov: bool = False  # of sgd
    beta2: float = 0.999  # of adam and adamw
    epsilon: float = 1e-8  # of adam and adamw: added to the root of the second moment
    # sgd and adam add it to the gradient (L2); adamw and adafactor decay apart from the gradient.
    weight_decay: float = 0.0
    decay_kernels_only: bool = True  # weights with more than one dimension, not biases and norms
    clip_norm: float = 0.0  # of the whole gradient; 0 for no limit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate changes."""

    warmup: float = 0.0  # share of the steps, linearly from 0
    decay: str = 'cosine'  # cosine (to 0), steps, constant, inverse_sqrt
    # Of steps: shares of the steps, at each of which a tenth of the rate is left.
    boundaries: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pruning:
    """When masks are updated, in shares of the steps, and which layers get how sparse."""

    start: float = 0.2  # gradual pruning
    end: float = 0.75  # gradual pruning
    frequency: float = 0.025  # between two updates
    # Static, SET and RigL, which are sparse from the beginning, and straight-through methods, whose weights come back.
    trainer_start: float = 0.0
    trainer_end: float = 0.75
    power: float = 3.0  # of the polynomial by which the sparsity grows
    drop_fraction: float = 0.3  # share of the kept weights that SET and RigL replace, at first
    distribution: str = 'uniform'  # uniform, erk
    sparsity_type: str = 'unstructured'  # or 2:4, block_4,4, …, or one of your own
    # Fields of algorithms of your own, which stand among the other keys of the section.
    own: Mapping[str, Plain] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every number of a training.

    >>> recipe = Recipe('resnet', model={'width': 16})
    >>> other = Recipe('resnet', model={'width': 8})
    >>> other.updated(tomllib.loads(recipe.to_toml())) == recipe
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
    # Sizes, and other numbers: by the workload's own names.
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for field in ('steps', 'batch_size'):
            if getattr(self, field) < 1:
                raise ValueError(f'{field} must be at least 1, got {getattr(self, field)}')
        if self.dtype not in ('float32', 'bfloat16'):
            raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")
        shares = {'eval_every': self.eval_every, 'schedule.warmup': self.schedule.warmup}
        for name in ('start', 'end', 'frequency', 'trainer_start', 'trainer_end'):
            shares[f'pruning.{name}'] = getattr(self.pruning, name)
        for name, share in shares.items():
            if not 0 <= share <= 1 or (name == 'eval_every' and not share):
                raise ValueError(
                    f'{name} must lie in [0, 1] (a share of the steps; eval_every above 0), got {share}'
                )

    def updated(self, changes: Mapping[str, Any], where: str = '') -> 'Recipe':
        """The recipe with other values, nested as in the file; `where` begins an error message.

        Raises a `ValueError` for an unknown key, or a value of another type or out of range.

        >>> Recipe('resnet').updated({'optimizer': {'name': 'adam'}}).optimizer.name
        'adam'
        """
        try:
            return _merge(self, changes, '')
        except (ValueError, TypeError) as error:
            raise ValueError(f'{where}: {error}' if where else str(error)) from None

    def to_toml(self) -> str:
        """The recipe as a TOML file."""
        lines, tables = [], []
        for key, value in dataclasses.asdict(self).items():
            if not isinstance(value, Mapping):
                lines.append(f'{key} = {_to_toml(value)}')
            elif value:
                numbers = value | value.get('own', {})
                numbers.pop('own', None)
                tables += ['', f'[{key}]']
                tables += [f'{name} = {_to_toml(number)}' for name, number in numbers.items()]
        return '\n'.join(lines + tables) + '\n'

    def digest(self) -> str:
        """The SHA-256 of the TOML file in hexadecimal: equal for runs with the same numbers."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Writes the TOML file, which appears when it is complete."""
        text = self.to_toml()
        atomic_files.replace_file(path, lambda temporary: temporary.write_text(text))

    def share(self, share: float) -> int:
        """A share of the steps, in [0, 1], as a number of steps."""
        return round(share * self.steps)


def read_recipe(path: Path, default: Recipe) -> Recipe:
    """Reads a TOML file over a default recipe; the file may hold only what differs.

    Raises a `ValueError` as `Recipe.updated` does, and for another workload.
    """
    changes = input_files.read_config(path)
    workload = changes.get('workload', default.workload)
    if workload != default.workload:
        raise ValueError(
            f'{path} is a recipe of the workload {workload!r}, not of {default.workload!r}'
        )
    return default.updated(changes, str(path))


def read_presets(workload: str) -> dict[str, Recipe]:
    """Reads the recipes of a workload from the files of this package, by preset."""
    recipes = {}
    for path in sorted(Path(__file__).with_name('presets').glob(f'{workload}_*.toml')):
        content = input_files.read_config(path)
        numbers = Recipe(workload, model=content['model'], task=content['task'])
        recipes[content['preset']] = numbers.updated(content, str(path))
    return recipes


def parse_override(text: str) -> dict[str, Any]:
    """Reads `key=value` as `Recipe.updated` takes it; a value that is no TOML is a string.

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


def _merge(old: Any, changes: Any, path: str) -> Any:
    """`old`, a record or a mapping, with changes; each has the type of the value it replaces."""
    if not isinstance(changes, Mapping):
        raise ValueError(f'{path} is a table of keys, got {changes!r}')
    is_record = dataclasses.is_dataclass(old)
    merged = dict(vars(old)) if is_record else dict(old)
    own = _own_fields() if isinstance(old, Pruning) else {}
    for key, value in changes.items():
        name = f'{path}.{key}' if path else key
        if key in own:
            settings = {**merged['own'], key: _convert(value, own[key], name)}
            # Recipes of equal values are equal files.
            merged['own'] = dict(sorted(settings.items()))
        elif key not in merged or key == 'own':
            nearest = tree_lib.nearest(key, [known for known in (*merged, *own) if known != 'own'])
            hint = '; fields of algorithms of your own need --modules' if path == 'pruning' else ''
            raise ValueError(f'the recipe has no key {name!r}; {nearest}{hint}')
        elif dataclasses.is_dataclass(merged[key]) or isinstance(merged[key], Mapping):
            merged[key] = _merge(merged[key], value, name)
        else:
            merged[key] = _convert(value, merged[key], name)
    return type(old)(**merged) if is_record else merged


def _own_fields() -> dict[str, Any]:
    """The default of each field that an algorithm from outside of this package has, by name."""
    return {
        field.name: field.default
        for algorithm in api.ALGORITHM_REGISTRY.values()
        for field in dataclasses.fields(algorithm)
        if field.init and not checks.is_of_library(algorithm, field.name)
    }


_TYPE_NAMES = {
    bool: 'true or false',
    int: 'a whole number',
    float: 'a number',
    str: 'a word',
    tuple: 'a list',
}


def _convert(value: Any, old: Any, name: str) -> Any:
    """The value as one of the old value's type; of any plain type where the old one is of none."""
    expected = type(old)
    if isinstance(value, list):
        value = tuple(value)
    if expected is float and type(value) is int:
        value = float(value)
    if expected is int and type(value) is float and value.is_integer():
        value = int(value)  # steps are often written 4e5
    is_right = type(value) is expected if expected in _TYPE_NAMES else isinstance(value, Plain)
    if not is_right:
        raise ValueError(
            f'{name} must be {_TYPE_NAMES.get(expected, "a plain value")}, got {value!r}'
        )
    return value


def _to_toml(value: Any) -> str:
    """A plain value as TOML writes it."""
    if isinstance(value, tuple | list):
        return f'[{", ".join(map(_to_toml, value))}]'
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
