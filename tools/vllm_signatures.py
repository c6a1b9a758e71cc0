"""Writes what the engine relies on in another vLLM than the installed one, read from its wheel or source archive.

Owns the reading, by ast: nothing of the archive is imported or installed. Does not judge; tests/engine/test_drift.py does.

    python -m pip download vllm==0.24.0 --no-deps -d FOLDER
    python tools/vllm_signatures.py FOLDER/vllm-0.24.0-*.whl > tests/engine/vllm_cuda.json
"""

from __future__ import annotations

import ast
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))


def reader(archive: Path) -> Callable[[str], str | None]:
    """A function that gives the text of `vllm/...py`, or None where there is no such file."""
    if archive.suffix == ".whl":
        wheel = zipfile.ZipFile(archive)
        names = set(wheel.namelist())
        return lambda name: wheel.read(name).decode() if name in names else None
    source = tarfile.open(archive)
    members = {m.name.partition("/")[2]: m for m in source.getmembers()}
    return lambda name: source.extractfile(members[name]).read().decode() if name in members else None


def find(read: Callable[[str], str | None], place: str) -> tuple[ast.Module, ast.AST] | None:
    """The module of a `module:Class.method` and the node that it names, in the class itself or in a base of that file."""
    module, _, path = place.partition(":")
    stem = module.replace(".", "/")
    text = read(f"{stem}.py") or read(f"{stem}/__init__.py")
    if text is None:
        return None
    tree = node = ast.parse(text)
    for name in path.split("."):
        node = _member(tree, node, name)
        if node is None:
            return None
    return tree, node


def _member(tree: ast.Module, node: ast.AST, name: str) -> ast.AST | None:
    # The last definition counts: those before it are overloads.
    for child in reversed(node.body):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
            return child
    for base in bases(tree, node):
        found = _member(tree, base, name)
        if found is not None:
            return found
    return None


def bases(tree: ast.Module, node: ast.AST) -> list[ast.ClassDef]:
    names = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
    return [child for child in tree.body if isinstance(child, ast.ClassDef) and child.name in names]


def parameters(node: ast.FunctionDef) -> list[str]:
    a = node.args
    return [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def fields(tree: ast.Module, node: ast.ClassDef) -> list[str]:
    own = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return [name for base in bases(tree, node) for name in fields(tree, base)] + own


def attributes(tree: ast.Module, node: ast.ClassDef) -> list[str]:
    """Names that methods of the class, or of its bases in the same file, set on `self` or the body declares."""
    stored = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
              and isinstance(n.value, ast.Name) and n.value.id == "self"}
    inherited = (name for base in bases(tree, node) for name in attributes(tree, base))
    return sorted(stored | set(fields(tree, node)) | set(inherited))


def signatures(read: Callable[[str], str | None]) -> dict[str, dict[str, list[str] | None]]:
    """For each place that the engine relies on, the names that are there; null where the place is not there."""
    import relied_on

    def each(places, describe, keep):
        found = {place: find(read, place) for place in places}
        return {place: None if pair is None else keep(describe(*pair), places[place]) for place, pair in found.items()}

    relevant = lambda names, wanted: [name for name in names if name in wanted]  # noqa: E731
    return {
        "calls": each(relied_on.VLLM_CALLS, lambda tree, node: parameters(node), lambda names, wanted: names),
        "fields": each(relied_on.VLLM_FIELDS, fields, relevant),
        "attributes": each(relied_on.VLLM_ATTRIBUTES, attributes, relevant),
    }


def main() -> None:
    archive = Path(sys.argv[1])
    note = "Made by tools/vllm_signatures.py, whose docstring says how."
    print(json.dumps({"note": note, "archive": archive.name} | signatures(reader(archive)), indent=1))


if __name__ == "__main__":
    main()
