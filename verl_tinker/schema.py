"""Which keys a preset may have and of what type: verl's, read from its files, and our own dataclasses.

Owns the check of a preset against them and the wording of what is wrong. Does not import verl: an import takes
seconds, and on a machine without a GPU it must wait until the CPU platform is announced.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CLASS_FILES = ("workers/config/*.py", "trainer/config/config.py", "utils/profiler/config.py")
_SIMPLE = {"int": int, "float": (int, float), "str": str, "list": list, "List": list, "tuple": list, "Iterable": list,
           "dict": Mapping, "Dict": Mapping}
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "list": "a list",
          "tuple": "a list", "dict": "a section of keys"}


class ConfigError(ValueError):
    """A preset, an override or an environment variable that cannot be used; the text names the key."""


def verl_folder() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError("the package verl is not installed; run ./install_verl.sh")
    return Path(spec.origin).parent


@functools.cache
def verl_classes() -> dict[str, dict[str, str]]:
    """verl's config dataclasses by name: field -> annotation, as written, inherited fields included."""
    found: dict[str, ast.ClassDef] = {}
    for pattern in _CLASS_FILES:
        for file in sorted(verl_folder().glob(pattern)):
            tree = ast.parse(file.read_text())
            found |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields_of(name: str) -> dict[str, str]:
        node = found[name]
        fields: dict[str, str] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in found:
                fields |= fields_of(base.id)
        own = (n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
        return fields | {n.target.id: ast.unparse(n.annotation) for n in own}

    return {name: fields_of(name) for name in found}


def annotations(cls: type) -> dict[str, str]:
    """The fields of a dataclass of ours with their annotations as text."""
    return {field.name: str(field.type) for field in dataclasses.fields(cls)}


def check_section(values: Any, fields: Mapping[str, str], path: str) -> None:
    """Check a section that one of our dataclasses describes."""
    _require_section(values, path)
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        if key not in fields:
            raise _unknown(here, sorted(fields))
        check_value(here, value, fields[key])


def check_verl(values: Any, default: Mapping[str, Any], path: str, class_name: str = "") -> None:
    """Check a section of verl's: its keys are those of verl's YAML and of the dataclass that it becomes."""
    _require_section(values, path)
    fields = verl_classes().get(str(default.get("_target_", class_name)).rpartition(".")[2], {})
    known = {key for key in (*default, *fields) if not key.startswith("_")}
    for key, value in values.items():
        here, annotation = f"{path}.{key}", fields.get(key, "")
        if key == "_target_" and str(value).rpartition(".")[2] in verl_classes():
            continue  # A preset that this server printed names them.
        if key not in known:
            raise _unknown(here, sorted(known), default)
        inner = default.get(key)
        if annotation in verl_classes() or (isinstance(inner, Mapping) and inner and "dict" not in annotation.lower()):
            if value is not None or inner is not None:
                check_verl(value, inner if isinstance(inner, Mapping) else {}, here, annotation)
        elif type(value) is not type(inner):
            check_value(here, value, annotation or _annotation_of(inner))


def check_value(path: str, value: Any, annotation: str) -> None:
    if isinstance(value, str) and "${" in value:
        return  # An interpolation: what it stands for is checked where it is defined.
    if not _accepts(ast.parse(annotation, mode="eval").body, value):
        raise ConfigError(f"{path} is {_shown(value)}; it must be {describe(annotation)}")


def describe(annotation: str) -> str:
    node = ast.parse(annotation, mode="eval").body
    return " or ".join(dict.fromkeys(_describe(node)))


def _annotation_of(default: Any) -> str:
    if default is None or str(default) == "???" or "${" in str(default):
        return "Any"
    name = type(default).__name__
    return "float" if name in ("int", "float") else name


def _accepts(node: ast.expr, value: Any) -> bool:
    match node:
        case ast.BinOp(left=left, right=right):
            return _accepts(left, value) or _accepts(right, value)
        case ast.Constant(value=None):
            return value is None
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return value is None or _accepts(inner, value)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return any(type(value) is type(choice) and value == choice for choice in _choices(node))
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return isinstance(value, list) and all(_accepts(inner, item) for item in value)
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inner])):
            return isinstance(value, Mapping) and all(_accepts(inner, item) for item in value.values())
        case ast.Subscript(value=base):
            return _accepts(base, value)
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id=name) if name in _SIMPLE:
            return isinstance(value, _SIMPLE[name]) and not isinstance(value, bool)
        case ast.Name(id=name) if name in verl_classes():
            return isinstance(value, Mapping)
    return True


def _describe(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BinOp(left=left, right=right):
            yield from (*_describe(left), *_describe(right))
        case ast.Constant(value=None):
            yield "null"
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from (*_describe(inner), "null")
        case ast.Subscript(value=ast.Name(id="Literal")):
            yield from (_shown(choice).strip("'") for choice in _choices(node))
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inner])):
            yield f"a section of keys, each with {' or '.join(_describe(inner))}"
        case ast.Subscript(value=base):
            yield from _describe(base)
        case _:
            name = ast.unparse(node)
            yield _WORDS.get(name, "anything" if name == "Any" else "a section of keys")


def _choices(node: ast.Subscript) -> list[Any]:
    choices = ast.literal_eval(node.slice)
    return list(choices) if isinstance(choices, tuple) else [choices]


def _shown(value: Any) -> str:
    """As the preset's author wrote it."""
    return {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else repr(value)


def _require_section(values: Any, path: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is {_shown(values)}; it must be a section of keys")


def _unknown(path: str, siblings: list[str], section: Mapping[str, Any] | None = None) -> ConfigError:
    parent, _, key = path.rpartition(".")
    near = [f"{parent}.{name}" if parent else name for name in difflib.get_close_matches(key, siblings, 1)]
    near = near or list(_deeper(key, section or {}, parent))[:1]
    hint = f"the nearest is {near[0]}" if near else f"keys there are {', '.join(siblings)}"
    return ConfigError(f"unknown key {path}; {hint}")


def _deeper(key: str, section: Mapping[str, Any], path: str) -> Iterator[str]:
    """Where a key of that very name stands further down: it was put a level too high."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            if key in value:
                yield f"{path}.{name}.{key}"
            yield from _deeper(key, value, f"{path}.{name}")
