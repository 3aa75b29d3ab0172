"""Paths, selection by name, and maps over pytrees in which a mask may be `None`.

A leaf is known by its path, a tuple of plain names. `None` in a tree of masks or of
sparsities stands for "this leaf is dense"; `jax.tree.map` refuses such trees, the
functions here take them.
"""

import collections
import difflib
import fnmatch
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

Path = tuple[str, ...]
PyTree = Any
# Which leaves are stacks of layers: a glob or a path, or several (the first axis counts layers), or a mapping to axes.
Stacked = str | Sequence[str | Path] | Mapping[Any, int]
# Whether a name in a setting means a leaf.
Matches = Callable[[Any, Path], bool]

_VALUE = jax.tree_util.GetAttrKey('value')

# The name under which a model that is one bare array is known.
SINGLE_ARRAY_PATH: Path = ('kernel',)


def flatten_with_paths(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Path], list[Any], Any]:
    """Flattens a pytree of arrays into paths, leaves and the tree's structure.

    Args:
      tree: any pytree.
      is_leaf: which nodes count as leaves besides arrays, as in `jax.tree.flatten`.

    Returns:
      The path of each leaf, the leaves, and the treedef that puts them together again.

    >>> flatten_with_paths({'dense': {'bias': 1.0, 'kernel': 2.0}})[:2]
    ([('dense', 'bias'), ('dense', 'kernel')], [1.0, 2.0])
    >>> flatten_with_paths(3.0)[0]
    [('kernel',)]
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    names = [
        tuple(
            str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))) for key in path
        )
        for path, _ in entries
    ]
    children_of = collections.Counter(name[:-1] for name in names)
    paths: list[Path] = []
    for (key_path, _), name in zip(entries, names, strict=True):
        # An only child called `value` is in the box of a Flax variable, which is no part of the name.
        if len(name) > 1 and key_path[-1] == _VALUE and children_of[name[:-1]] == 1:
            name = name[:-1]
        paths.append(name or SINGLE_ARRAY_PATH)
    return paths, [leaf for _, leaf in entries], treedef


def as_arrays(tree: PyTree) -> PyTree:
    """Makes arrays of numbers of Python, as `jax.jit` takes them; returns the same tree if there are none.

    Args:
      tree: any pytree.

    >>> as_arrays({'scale': 1.0})
    {'scale': array(1., dtype=float32)}
    """

    def as_array(leaf):
        is_number = isinstance(leaf, bool | int | float | complex)
        return np.asarray(leaf, jax.dtypes.result_type(leaf)) if is_number else leaf

    return jax.tree.map(as_array, tree)


def leaves_like(treedef: Any, tree: PyTree) -> list[Any]:
    """Lists the entries of `tree` at the leaves of `treedef`, `None` where the tree holds no array.

    Besides `None` itself, `optax.MaskedNode` (a leaf that belongs to another optimizer) counts as no array. Where
    containers are of other kinds (dict and FrozenDict), or lack wrappers, entries are matched to leaves by name.

    Args:
      treedef: the structure of the parameters.
      tree: a tree of that structure in which leaves or whole subtrees may be missing.

    Returns:
      One entry for each leaf of `treedef`.

    Raises:
      ValueError: the tree has another structure.

    >>> leaves_like(jax.tree.structure({'a': 1, 'b': 2}), {'a': None, 'b': 5})
    [None, 5]
    """
    try:
        entries = treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        entries = _entries_by_name(treedef, tree)
    unboxed: list[Any] = []
    for entry in entries:  # a box, or a wrapper, holds one array or nothing
        inside = jax.tree.leaves(entry)
        unboxed.append(inside[0] if len(inside) == 1 else entry if inside else None)
    return unboxed


def _entries_by_name(treedef, tree):
    """Matches entries to leaves by name; a whole subtree may be missing, or any name in a `defaultdict`."""

    def is_missing(entry):
        return entry is None or isinstance(entry, optax.MaskedNode)

    if is_missing(tree):
        return [None] * treedef.num_leaves
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    names = flatten_with_paths(numbered, _is_wrapper)[0]
    found = flatten_with_paths(tree, lambda node: is_missing(node) or _is_wrapper(node))
    entry_by_name = dict(zip(*found[:2], strict=True))
    missing = [name for name, entry in entry_by_name.items() if is_missing(entry)]
    besides = entry_by_name.keys() - missing - set(names)
    lacking = set(names) - entry_by_name.keys()
    # Missing subtrees, and what stands inside of a wrapper that is missing.
    lacking -= {n for n in lacking for p in missing if n[: len(p)] == p[: len(n)]}
    if isinstance(tree, collections.defaultdict):
        lacking.clear()
    if lacking or besides:
        lists = [sorted(map(path_string, names))[:4] for names in (lacking, besides)]
        raise ValueError(
            'a tree of masks, scores, gradients or sparsities does not fit the structure of the parameters: it lacks '
            f'{lists[0] or "nothing"} and has {lists[1] or "nothing"} besides; give one entry for each parameter, an '
            'array or None, and where the state holds the masks, the parameters that it was made for'
        )
    return [entry_by_name.get(name) for name in names]


def _is_wrapper(node):
    """Whether a node holds one array and says what its axes are, as boxes of Flax and named arrays of haliax do.

    The array is called `value` or `array`, or has no name.
    """
    if isinstance(node, tuple | list | Mapping):
        return False
    entries, treedef = jax.tree_util.tree_flatten_with_path(node)
    if len(entries) != 1 or treedef.num_nodes != 2:
        return False
    key = entries[0][0][0]
    is_unnamed = isinstance(key, jax.tree_util.FlattenedIndexKey)
    return is_unnamed or key in (_VALUE, jax.tree_util.GetAttrKey('array'))


def zip_with_paths(tree: PyTree, *rest: PyTree) -> Iterator[tuple[Any, ...]]:
    """Lists the path and the leaf of each leaf of a tree, and the entries of other trees there, which may be `None`.

    >>> list(zip_with_paths({'a': 3, 'b': 4}, {'a': 5, 'b': None}))
    [(('a',), 3, 5), (('b',), 4, None)]
    """
    paths, leaves, treedef = flatten_with_paths(tree)
    return zip(paths, leaves, *(leaves_like(treedef, other) for other in rest), strict=True)


def unflatten(treedef: Any, entries: Iterable[Any], leaves: Iterable[Any]) -> PyTree:
    """Puts an entry in the place of each leaf, as `jax.tree.unflatten`, where entries may be no arrays of its shape.

    A wrapper that names the axes of a leaf (a variable of Flax with axis names, a `NamedArray` of haliax) holds arrays
    of as many axes alone. `None` and arrays of another rank stand in its place.

    Args:
      treedef: the structure of the parameters.
      entries: an array, a number or `None` for each leaf.
      leaves: the parameters, or their shapes.

    >>> leaves, treedef = jax.tree.flatten({'a': jnp.ones((2, 2)), 'b': jnp.ones(2)})
    >>> unflatten(treedef, [0.5, None], leaves)
    {'a': 0.5, 'b': None}
    """
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    nodes, outer = jax.tree.flatten(numbered, is_leaf=_is_wrapper)
    placed = []
    for node, entry, leaf in zip(nodes, entries, leaves, strict=True):
        is_wrapped = entry is not None and np.ndim(entry) == np.ndim(leaf)
        placed.append(jax.tree.structure(node).unflatten([entry]) if is_wrapped else entry)
    return jax.tree.unflatten(outer, placed)


def map_with_missing(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps over a tree and others like it in which leaves may be `None`.

    Args:
      function: called with the leaf of `tree` and the entries of `rest`, each an array or `None`.
      tree: sets the structure; it has an array in each leaf, such as the parameters. A `None` in it is no leaf, as in
        `jax.tree.map`.
      *rest: trees of the same structure, leaves may be `None`.

    Returns:
      The results in the structure of `tree`, as `unflatten` puts them there.

    Raises:
      ValueError: a tree of `rest` has another structure, or leaves that `tree` lacks.

    >>> map_with_missing(lambda p, m: p if m is None else p * m, {'a': 3, 'b': 4}, {'a': None, 'b': 0})
    {'a': 3, 'b': 0}
    """
    leaves, treedef = jax.tree.flatten(tree)
    others = [leaves_like(treedef, other) for other in rest]
    return unflatten(treedef, map(function, leaves, *others), leaves)


def path_string(path: Path) -> str:
    """Writes the path as text, `'a/b/kernel'`.

    >>> path_string(('encoder', '0', 'kernel'))
    'encoder/0/kernel'
    """
    return '/'.join(path)


def matches(name: str | Path, path: Path) -> bool:
    """Whether a leaf's name as given in settings means the leaf at `path`.

    Args:
      name: the path as a tuple, as `'a/b/kernel'`, or as a glob, `'*/kernel'` (`*` also crosses `/`).
      path: the leaf's path.

    >>> matches('*/kernel', ('a', 'b', 'kernel')), matches(('a',), ('a', 'b'))
    (True, False)
    """
    if not isinstance(name, str):
        return tuple(str(part) for part in name) == path
    return name == path_string(path) or fnmatch.fnmatchcase(path_string(path), name)


def as_names(names: Stacked) -> tuple[str | Path, ...]:
    """Returns several names (or the keys of a mapping) as a tuple, and a single one, too."""
    return (names,) if isinstance(names, str) else tuple(names)


def matches_any(names: str | Sequence[str | Path], path: Path) -> bool:
    """Whether one of these names means the leaf at `path`, as in `matches`."""
    return any(matches(name, path) for name in as_names(names))


def check_axis(axis: int, shape: Sequence[int], where: str) -> None:
    """Refuses an axis that a shape does not have; `where` is how the message begins.

    >>> check_axis(-1, (2, 3), 'kernel')
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f'{where}: axis {axis} does not exist in shape {tuple(shape)}')


def layer_axes(
    stacked: Stacked,
    paths: Sequence[Path],
    shapes: Sequence[tuple[int, ...]],
    matches: Matches = matches,
) -> list[int | None]:
    """Finds the axis of each leaf that counts layers; `None` where no name of `stacked` means the leaf.

    Args:
      stacked: names or globs of leaves whose first axis counts layers, or a mapping from them to axes.
      paths: the paths of all leaves.
      shapes: their shapes; a number is no stack, whatever its name.
      matches: `(name, path) -> bool`, what a name means.

    Raises:
      ValueError: a name matches no leaf, or a leaf has no such axis.

    >>> layer_axes({'layers/*': 1}, [('layers', 'kernel'), ('head',)], [(32, 2, 64), (32, 4)])
    [1, None]
    """
    axes = stacked if isinstance(stacked, Mapping) else dict.fromkeys(as_names(stacked), 0)
    found: list[int | None] = [None] * len(paths)
    for i, axis in values_by_leaf(axes, paths, 'stacked', matches).items():
        if shapes[i]:
            check_axis(axis, shapes[i], f'stacked: {path_string(paths[i])}')
            found[i] = axis % len(shapes[i])
    return found


def layer_shape(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """Returns the shape of one layer, given the axis that counts layers; `None` for a leaf that is no stack.

    >>> layer_shape((32, 2, 64), 1), layer_shape((32, 64), None)
    ((32, 64), (32, 64))
    """
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def per_layer(function: Callable[..., Any], axis: int | None) -> Callable[..., Any]:
    """Maps a function over the layers that an axis of its arguments and results counts, if there is one.

    >>> per_layer(jnp.flip, 1)(jnp.array([[1, 2], [3, 4]])).tolist()
    [[3, 4], [1, 2]]
    """
    return function if axis is None else jax.vmap(function, axis, axis)


def rule_name(name: Any, where: str = '') -> str | Path:
    """Reads the name of leaves in a setting; a list, as files and configs hold it, is a path.

    `where` is how the message of the `TypeError` for anything else begins: the setting and a colon.

    >>> rule_name(['a', 'kernel'])
    ('a', 'kernel')
    """
    if isinstance(name, list | tuple) and all(isinstance(part, str) for part in name):
        return tuple(name)
    if isinstance(name, str):
        return name
    raise TypeError(f"{where}name leaves by 'a/kernel', a path or a glob, got {name!r}")


def read_rules(rules: Any, setting: str) -> dict[str | Path, Any]:
    """Reads ordered rules for leaves, a mapping from names to values or a list of such pairs, as a dict.

    Args:
      rules: what a setting was given; a ConfigDict, which is no mapping, has its methods.
      setting: what the setting is called, for the message.

    Raises:
      TypeError: it is neither, or a name is none.
      ValueError: a name has two rules.

    >>> read_rules([('head/*', None), (['a', 'kernel'], 0.5)], 'custom_sparsity_map')
    {'head/*': None, ('a', 'kernel'): 0.5}
    """
    pairs = [(name, rules[name]) for name in rules] if hasattr(rules, 'keys') else rules
    is_list = isinstance(pairs, list | tuple)
    if not is_list or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f'{setting} must map names of leaves, or be a list of pairs, got {rules!r}')
    read: dict[str | Path, Any] = {}
    for name, value in pairs:
        name = rule_name(name, f'{setting}: ')
        if name in read:
            raise ValueError(f'{setting} has two rules for {name!r}; leave one of them out')
        read[name] = value
    return read


def check_names(
    names: Iterable[str | Path], paths: Sequence[Path], setting: str, matches: Matches = matches
) -> None:
    """Refuses names that mean no leaf.

    Args:
      names: names or globs from a setting.
      paths: the paths of all leaves.
      setting: what the setting is called, for the message.
      matches: `(name, path) -> bool`, what a name means.

    Raises:
      ValueError: a name matches no leaf; the message lists the nearest ones.

    >>> check_names(['*/kernel'], [('a', 'kernel')], 'stacked')
    """
    for name in names:
        if not any(matches(name, path) for path in paths):
            known = list(map(path_string, paths))
            text = name if isinstance(name, str) else path_string(name)
            near = difflib.get_close_matches(text, known, n=3, cutoff=0.4) or known[:3]
            raise ValueError(
                f'{setting}: {name!r} matches no parameter; the nearest are {", ".join(map(repr, near))}'
            )


def values_by_leaf(
    rules: Mapping[Any, Any], paths: Sequence[Path], setting: str, matches: Matches = matches
) -> dict[int, Any]:
    """Finds the value that some ordered rules give each leaf: that of the first name which matches it.

    Args:
      rules: from names or globs, in their order, to values.
      paths: the paths of all leaves.
      setting: what the setting is called, for the messages.
      matches: `(name, path) -> bool`, what a name means.

    Returns:
      The value by the index of the leaf, without the leaves that no name matches.

    Raises:
      ValueError: a name matches no leaf, or only leaves that earlier rules take.

    >>> values_by_leaf({'head/*': None, '*/w': 0.5}, [('head', 'w'), ('a', 'w'), ('a', 'b')], 'custom_sparsity_map')
    {0: None, 1: 0.5}
    """
    check_names(rules, paths, setting, matches)
    chosen = {}
    for i, path in enumerate(paths):
        matching = [name for name in rules if matches(name, path)]
        if matching:
            chosen[i] = matching[0]
    for i, name in enumerate(rules):
        # A last "all others" may well find nothing left.
        if name not in chosen.values() and not (name == '*' and i == len(rules) - 1):
            raise ValueError(
                f'{setting}: {name!r} is never used, since earlier names match all of its parameters; put it first (a '
                'ConfigDict sorts its keys: give a list of pairs)'
            )
    return {i: rules[name] for i, name in chosen.items()}


def is_traced(value: Any) -> bool:
    """Whether a value is only known when the compiled program runs, so that it cannot be checked.

    >>> is_traced(0.5)
    False
    """
    return isinstance(value, jax.core.Tracer)


def has_traced(tree: PyTree) -> bool:
    """Whether any leaf is traced: what is computed from the tree is then part of a larger program.

    >>> has_traced({'a': 0.5, 'b': None})
    False
    """
    return any(map(is_traced, jax.tree.leaves(tree)))


def leaf_shape(leaf: Any, path: Path) -> tuple[int, ...]:
    """The shape of a parameter. Raises TypeError if it is no array.

    >>> leaf_shape(jnp.ones((2, 3)), ('kernel',))
    (2, 3)
    """
    if hasattr(leaf, 'shape') and hasattr(leaf, 'dtype'):
        return tuple(leaf.shape)
    if isinstance(leaf, int | float | complex):
        return ()
    raise TypeError(
        f'{path_string(path)} is no array but {leaf!r}; give the arrays alone and put the rest into apply_fn '
        '(equinox.partition(model, equinox.is_array), flax.nnx.split(model))'
    )


def is_instance(value: Any, library: str, *names: str) -> bool:
    """Whether a value is of a class of a library, which is not imported for it.

    >>> is_instance(np.float32(0.5), 'numpy', 'float32', 'float64')
    True
    """
    module = sys.modules.get(library)
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in names))


def is_number(value: Any) -> bool:
    """Whether a value is a real scalar of Python, NumPy or JAX, perhaps a traced one; a bool is none.

    >>> is_number(0.5), is_number('0.5'), is_number(True)
    (True, False, False)
    """
    dtype = getattr(value, 'dtype', None)
    if dtype is None:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return is_real and getattr(value, 'ndim', None) == 0


def holds_weights(leaf: Any) -> bool:
    """Whether a leaf holds floats or complex numbers; indices, flags and random keys are no weights.

    >>> holds_weights(np.ones(2)), holds_weights(np.arange(2))
    (True, False)
    """
    dtype = getattr(leaf, 'dtype', None)
    return dtype is None or jnp.issubdtype(dtype, jnp.inexact)


def at_least_float32(dtype: Any) -> jnp.dtype:
    """Returns the dtype, or float32 where that is wider: sums and products of few bits overflow or vanish.

    >>> at_least_float32('bfloat16'), at_least_float32('float8_e5m2'), at_least_float32('complex64')
    (dtype('float32'), dtype('float32'), dtype('complex64'))
    """
    dtype = jnp.dtype(dtype)
    # JAX promotes no float of 8 bits, and no number of less.
    return jnp.dtype('float32') if dtype.itemsize == 1 else jnp.promote_types(dtype, jnp.float32)


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the known name that looks most like an unknown one, or else what is known, in the words of an error.

    >>> nearest('magnitud', ['magnitude', 'random'])
    "did you mean 'magnitude'?"
    """
    known = sorted(known)
    if best := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f'did you mean {best[0]!r}?'
    return f'known are {", ".join(map(repr, known[:30]))}{", …" if known[30:] else ""}'
