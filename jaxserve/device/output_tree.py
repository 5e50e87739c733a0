"""The structure of what a program returns, as JSON, so that a program kept on disk can be called like
the one it was made from.

Used by `program_store`. jax.export keeps flat arrays in and out here: its own trees would need every
class of ours in a process-wide table of jax. Containers of Python are written down as they are; a
class is written as text and looked up among those that the program is given or says it returns, so
nothing in a file can name a class to import.

Invariant: `read_tree(write_tree(tree, known), known, leaves)` is `tree` with its leaves replaced.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

Spec = int | None | dict[str, Any]
Structures = dict[str, Any]  # text of a jax.tree_util.PyTreeDef -> it

_LEAF = jax.tree_util.tree_structure(0)


def known_structures(arguments: Any, returns: Sequence[type] = ()) -> Structures:
    """Every class among some arguments, by the text of its structure, and NamedTuples by name.

    Args:
        arguments: any tree.
        returns: NamedTuple classes that may be returned as well.
    """
    samples = [cls(*range(len(cls._fields))) for cls in returns]  # type: ignore[attr-defined]
    nodes = [*_nodes(arguments), *samples]
    return {str(structure): structure for _, structure in map(_open, nodes)}


def write_tree(tree: Any, known: Structures) -> Spec:
    """The structure of a tree whose leaves are numbered: 0, 1, ... in jax's order.

    Raises:
        TypeError: a class that is not known; it is named.
    """
    children, structure = _open(tree)
    if structure == _LEAF:
        return int(tree)
    if tree is None:
        return None
    if type(tree) is dict:
        pairs = [[key, write_tree(child, known)] for key, child in tree.items()]
        if not all(isinstance(key, str | int) for key in tree):
            raise TypeError(f"a dict with keys that are neither text nor integers: {list(tree)}")
        return {"dict": pairs}
    parts = [write_tree(child, known) for child in children]
    if type(tree) in (list, tuple):
        return {type(tree).__name__: parts}
    if str(structure) not in known:
        raise TypeError(
            f"a program returns a {type(tree).__name__} that it is not given: name its class in "
            "Program.returns"
        )
    return {"known": str(structure), "parts": parts}


def read_tree(spec: Any, known: Structures, leaves: Sequence[Any]) -> Any:
    """Undoes `write_tree`, with these leaves.

    Raises:
        KeyError, IndexError: a structure that is not known, or too few leaves.
    """
    if spec is None:
        return None
    if isinstance(spec, int):
        return leaves[spec]
    if "dict" in spec:
        return {key: read_tree(child, known, leaves) for key, child in spec["dict"]}
    for kind in (list, tuple):
        if kind.__name__ in spec:
            return kind(read_tree(child, known, leaves) for child in spec[kind.__name__])
    parts = [read_tree(child, known, leaves) for child in spec["parts"]]
    return jax.tree_util.tree_unflatten(known[spec["known"]], parts)


def _nodes(tree: Any) -> Iterator[Any]:
    """All nodes that are classes and no containers of Python, from the outside in."""
    children, structure = _open(tree)
    if structure == _LEAF or tree is None:
        return
    if type(tree) not in (dict, list, tuple):
        yield tree
    for child in children:
        yield from _nodes(child)


def _open(node: Any) -> tuple[list[Any], Any]:
    """The children of one node, and its structure with leaves in their places."""
    return jax.tree_util.tree_flatten(node, is_leaf=lambda child: child is not node)
