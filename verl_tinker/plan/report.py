"""A preset's plan as one object, as text and as a tree for JSON.

Owns what the plan says. Does not read the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_tinker.config import Config
from verl_tinker.core.placement import PlacementError, Plan, Role, fewest_nodes, place
from verl_tinker.plan.fit import Part, gib, host_bytes, parts
from verl_tinker.plan.memory import GIB
from verl_tinker.plan.roles import roles
from verl_tinker.plan.size import described, model_size

# The SDK asks for this rank unless the client names another.
LORA_RANK = 32
_COLUMNS = ("weights", "gathered", "gradients", "optimizer", "adapters", "activations", "logits", "cache", "scores",
            "reserve")


@dataclass(frozen=True)
class Cluster:
    """`nodes` None stands for as few as suffice."""

    gpus_per_node: int = 8
    gpu_gib: float = 80.0
    nodes: int | None = None


@dataclass
class Report:
    """`placement` is None without a GPU, and where the roles do not fit on the nodes."""

    source: str
    on_cpu: bool
    cluster: Cluster
    roles: list[Role]
    placement: Plan | None
    parts: list[Part]
    host_bytes: float
    problems: list[str]

    def tree(self) -> dict[str, Any]:
        """For JSON; sizes are bytes."""
        found = {role.name: {"gpus": role.size, "replicas": role.replicas} for role in self.roles}
        if self.placement is not None:
            for name, replicas in self.placement.roles.items():
                found[name]["placement"] = replicas
        return {"preset": self.source, "cluster": asdict(self.cluster), "roles": found, "fits": not self.problems,
                "memory": [asdict(part) | {"total": part.total} for part in self.parts],
                "host_bytes_per_node": self.host_bytes, "problems": self.problems}


def report(
    config: Config, cluster: Cluster, descriptions: Mapping[str, Path] | None = None, lora_rank: int = LORA_RANK
) -> Report:
    """Plan a preset. `descriptions`: folders with a config.json, by the paths that the preset gives its models.

    Raises ConfigError when a model's description is not to be had. What does not fit is in `problems`.
    """
    def sizes(path: str):
        return model_size(described(path, descriptions or {}, config.cache_dir))

    wanted, placement, problems = roles(config), None, []
    if config.device == "cuda":
        try:
            nodes = cluster.nodes or fewest_nodes(cluster.gpus_per_node, wanted)
            cluster = Cluster(cluster.gpus_per_node, cluster.gpu_gib, nodes)
            placement = place([cluster.gpus_per_node] * nodes, wanted)
        except PlacementError as error:
            problems.append(str(error))
    found = parts(config, sizes, cluster.gpu_gib * GIB, lora_rank)
    host = host_bytes(config, sizes(config.models[config.server.model_name]))
    problems += _unfit(found)
    return Report(config.source, config.device == "cpu", cluster, wanted, placement, found, host, problems)


def _unfit(found: list[Part]) -> list[str]:
    """What rules the preset out. Where it allows two ways of training, one that fits is enough."""
    ways = [part for part in found if part.role == "trainer"]
    possible = [part for part in ways if not part.problems]
    for part in ways if possible else []:
        if part.problems:
            part.notes += [f"this does not fit, the other way of training does: {problem}, or set actor.mode="
                           f"{'lora' if part.what.startswith('full') else 'full'}" for problem in part.problems]
            part.problems = []
    return [f"{part.role}, {part.what}: {problem}" for part in found for problem in part.problems]


def text(result: Report) -> str:
    cluster, lines = result.cluster, [result.source, ""]
    if result.placement is not None:
        total = sum(role.size for role in result.roles)
        lines[0] += f": {total} of {cluster.nodes} x {cluster.gpus_per_node} GPUs of {cluster.gpu_gib:g} GiB"
    width, unit = max(len(role.name) for role in result.roles), "process" if result.on_cpu else "GPU"
    for role in result.roles:
        where = _where(result.placement, role.name) if result.placement is not None else ""
        lines.append(f"{role.name:{width}}  {role.size:3} {_several(unit, role.size)}  {where}".rstrip())
    lines += ["", f"GiB {'of each process' if result.on_cpu else 'on each GPU'}, estimated", *_table(result.parts)]
    lines += [f"{part.role}, {part.what}: {note}" for part in result.parts for note in part.notes]
    if result.host_bytes:
        lines.append(f"host memory of a node: {gib(result.host_bytes)} GiB")
    return "\n".join(lines + [f"Does not fit. {problem}" for problem in result.problems])


def _several(unit: str, count: int) -> str:
    return unit if count == 1 else f"{unit}es" if unit.endswith("s") else f"{unit}s"


def _where(plan: Plan, role: str) -> str:
    found = []
    for node in plan.nodes(role):
        gpus = [gpu for n, gpu in plan.gpus(role) if n == node]
        # A role's GPUs of a node are handed out in a row.
        found.append(f"node {node}: {gpus[0]}" + (f"-{gpus[-1]}" if len(gpus) > 1 else ""))
    return "; ".join(found)


def _table(found: list[Part]) -> list[str]:
    columns = [name for name in _COLUMNS if any(part.bytes.get(name) for part in found)]
    rows = [["", *columns, "together"]]
    for part in found:
        cells = [gib(part.bytes[name]) if part.bytes.get(name) else "" for name in columns]
        rows.append([f"{part.role}, {part.what}", *cells, gib(part.total)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
            for row in rows]
