"""Preset files and overrides as plain trees of dicts, and the laying of one on another.

Owns where presets are looked for. Does not know which keys there are: `verl_tinker.schema` and `.config` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_tinker.schema import ConfigError


def find_preset(path: str | Path) -> Path:
    """Look from the current folder, then from the repository, then in the installed package."""
    package = Path(__file__).resolve().parent
    places = [Path.cwd(), package.parent, package]
    for place in places:
        if (place / Path(path).expanduser()).is_file():
            return place / Path(path).expanduser()
    known = sorted(str(f.relative_to(p)) for p in places[1:] for f in p.glob("configs/**/*.yaml"))
    raise ConfigError(f"there is no preset {path}, neither from {Path.cwd()} nor among ours: {', '.join(known)}")


def read_preset(file: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # YAML's errors and OmegaConf's have no common type.
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is not a preset: it must be sections of keys")
    return tree


def single(dotted: str, value: Any) -> dict[str, Any]:
    """The tree that holds `value` at `a.b.c`, and nothing else."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def parsed(text: str) -> Any:
    """What YAML makes of the text, with 1e-4 for a number as in presets."""
    import yaml
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]
    except yaml.YAMLError:
        return text


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, section by section; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else merged({}, value) if isinstance(value, Mapping) else value
    return result
