"""Which GPU of which node each role gets, or one error that names the key to change.

Owns the plan. Takes no GPU: the engine asks Ray for what is planned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Gpu = tuple[int, int]
"""(node, GPU of that node), both counted from 0."""

# A search that tries so many arrangements without success has met sizes that do not fit each other.
_MOST_TRIES = 20_000


class PlacementError(ValueError):
    """The roles do not fit; the text names the preset's key."""


@dataclass(frozen=True)
class Role:
    """`replicas` groups of `replica_size` GPUs each. What shares a pool, as trainer, sampler and reference do, is one role.

    A replica takes at most `per_node` GPUs of a node, a larger one that many on each of several nodes. `groups` are the
    sizes of tensor-parallel groups that its GPUs, in order, are cut into, each with the preset's key for it. With
    `strict_pack` all replicas stand on one node, or on whole nodes when one is too small. `key` is what to lower.
    """

    name: str
    replicas: int
    replica_size: int
    per_node: int
    key: str
    groups: tuple[tuple[int, str], ...] = ()
    strict_pack: bool = False

    @property
    def size(self) -> int:
        return self.replicas * self.replica_size


@dataclass(frozen=True)
class _Block:
    """GPUs that must lie on one node; those of the same `apart` must lie on different nodes."""

    role: int
    size: int
    apart: int
    replicas: tuple[int, ...]


@dataclass
class Plan:
    """For each role the GPUs of each of its replicas, in order of rank."""

    roles: dict[str, list[list[Gpu]]] = field(default_factory=dict)

    def gpus(self, role: str) -> list[Gpu]:
        return [gpu for replica in self.roles[role] for gpu in replica]

    def nodes(self, role: str) -> list[int]:
        return sorted({node for node, _ in self.gpus(role)})


def place(nodes: Sequence[int], roles: Sequence[Role]) -> Plan:
    """`nodes`: GPUs of each node. Of equal sizes the role that is named first is placed first. Raises PlacementError."""
    for role in roles:
        _check_role(role, max(nodes, default=0))
    needed, there = sum(role.size for role in roles), sum(nodes)
    if needed > there:
        raise PlacementError(f"{_sizes(roles)} are {needed} GPUs, and {_shape(nodes)} have {there}; "
                             f"{_remedies(roles)}, or give more nodes")
    blocks = [block for i, role in enumerate(roles) for block in _blocks(i, role, max(nodes))]
    # The largest first, because what is left of a node when small ones were placed may hold no large one.
    blocks.sort(key=lambda block: (-block.size, block.role))
    chosen = _search(list(nodes), blocks)
    if chosen is None:
        raise PlacementError(f"{_sizes(roles)} do not fit on {_shape(nodes)}, whose GPUs would be enough: what must lie on "
                             f"one node leaves gaps; {_remedies(roles)}, or give more nodes")
    return _numbered(roles, blocks, chosen)


def fewest_nodes(gpus_per_node: int, roles: Sequence[Role]) -> int:
    """How many equal nodes the roles need. Raises PlacementError when no number of them is enough."""
    count = max(1, -(-sum(role.size for role in roles) // gpus_per_node))
    while True:
        try:
            place([gpus_per_node] * count, roles)
            return count
        except PlacementError:
            if count >= sum(_most_blocks(role) for role in roles):
                raise
            count += 1


def _most_blocks(role: Role) -> int:
    return role.replicas * -(-role.replica_size // min(role.per_node, role.replica_size))


def _check_role(role: Role, largest_node: int) -> None:
    on_a_node = min(role.per_node, role.replica_size)
    if min(role.replicas, role.replica_size, role.per_node) < 1:
        raise PlacementError(f"{role.name} asks for no GPU; {role.key} must be at least 1")
    if role.replica_size % on_a_node:
        raise PlacementError(f"{role.name} takes {role.replica_size} GPUs for a replica and at most {on_a_node} of a node, "
                             f"which does not divide them; change {role.key}")
    if on_a_node > largest_node:
        raise PlacementError(f"{role.name} takes {on_a_node} GPUs of one node, and the largest node has {largest_node}; "
                             f"lower {role.key}")
    for size, key in role.groups:
        if role.replica_size % size:
            raise PlacementError(f"{role.name}: {key} is {size}, which does not divide its {role.replica_size} GPUs")
        if on_a_node % size and size % on_a_node:
            raise PlacementError(
                f"{role.name}: {key} is {size}, so that a group would lie on parts of two nodes with {on_a_node} GPUs each; "
                f"choose one that divides {on_a_node}, or a multiple of it")


def _blocks(index: int, role: Role, largest_node: int) -> list[_Block]:
    on_a_node = min(role.per_node, role.replica_size)
    if role.strict_pack:
        return _packed_blocks(index, role, largest_node)
    shares = role.replica_size // on_a_node
    return [_Block(index, on_a_node, replica, (replica,)) for replica in range(role.replicas) for _ in range(shares)]


def _packed_blocks(index: int, role: Role, largest_node: int) -> list[_Block]:
    """Everything of the role in as few nodes as can be, those full but for none or the only one."""
    whole = role.size if role.size <= largest_node else largest_node
    if role.size % whole or (whole % role.replica_size and role.replica_size % whole):
        raise PlacementError(
            f"{role.name} is to be packed and takes {role.size} GPUs, which are more than one node of {largest_node} and no "
            f"whole nodes; change {role.key}, or set distillation.strict_pack=false")
    each = max(1, whole // role.replica_size)
    if whole < role.replica_size:
        return [_Block(index, whole, 0, (replica,)) for replica in range(role.replicas)
                for _ in range(role.replica_size // whole)]
    return [_Block(index, whole, 0, tuple(range(first, first + each))) for first in range(0, role.replicas, each)]


def _search(free: list[int], blocks: list[_Block]) -> list[int] | None:
    """The node of each block, or None. Fullest node first; goes back when that was wrong."""
    chosen: list[int] = []
    hopeless: set[tuple] = set()
    tries = 0

    def candidates(block: _Block) -> Iterator[int]:
        taken = {node for node, other in zip(chosen, blocks) if (other.role, other.apart) == (block.role, block.apart)}
        seen: set[tuple] = set()
        for node in sorted(range(len(free)), key=lambda n: (free[n], n)):
            # Nodes that look alike to all blocks that are still to come lead to the same end.
            alike = (free[node], _open_groups(node, chosen, blocks))
            if free[node] >= block.size and node not in taken and alike not in seen:
                seen.add(alike)
                yield node

    def extend() -> bool:
        nonlocal tries
        if len(chosen) == len(blocks):
            return True
        state = (len(chosen), tuple(sorted((free[n], _open_groups(n, chosen, blocks)) for n in range(len(free)))))
        tries += 1
        if state in hopeless or tries > _MOST_TRIES:
            return False
        block = blocks[len(chosen)]
        for node in candidates(block):
            chosen.append(node)
            free[node] -= block.size
            if extend():
                return True
            free[chosen.pop()] += block.size
        hopeless.add(state)
        return False

    return chosen if extend() else None


def _open_groups(node: int, chosen: list[int], blocks: list[_Block]) -> tuple:
    """Which groups of blocks that must lie apart have one on this node and others still to come."""
    to_come = {(block.role, block.apart) for block in blocks[len(chosen):]}
    here = {(block.role, block.apart) for n, block in zip(chosen, blocks) if n == node}
    return tuple(sorted(here & to_come))


def _numbered(roles: Sequence[Role], blocks: list[_Block], chosen: list[int]) -> Plan:
    placed = sorted(zip(blocks, chosen), key=lambda pair: (pair[0].role, pair[0].replicas, pair[1]))
    plan = Plan({role.name: [[] for _ in range(role.replicas)] for role in roles})
    used: dict[int, int] = {}
    for block, node in placed:
        first = used.get(node, 0)
        used[node] = first + block.size
        share = block.size // len(block.replicas)
        for i, replica in enumerate(block.replicas):
            start = first + i * share
            plan.roles[roles[block.role].name][replica] += [(node, gpu) for gpu in range(start, start + share)]
    return plan


def _sizes(roles: Sequence[Role]) -> str:
    return ", ".join(f"{role.name} ({role.size})" for role in roles)


def _shape(nodes: Sequence[int]) -> str:
    if len(set(nodes)) == 1:
        return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} of {nodes[0]}"
    return f"nodes of {', '.join(map(str, nodes))}" if nodes else "no nodes"


def _remedies(roles: Sequence[Role]) -> str:
    return "lower " + " or ".join(dict.fromkeys(role.key for role in sorted(roles, key=lambda role: -role.size)))
