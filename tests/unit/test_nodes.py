"""What a Ray cluster must have before a preset takes it."""

from __future__ import annotations

import re

import pytest

from verl_tinker.core.placement import Role
from verl_tinker.engine.nodes import missing

pytestmark = pytest.mark.timeout(60)


def node(gpus: float, alive: bool = True) -> dict:
    return {"Alive": alive, "Resources": {"GPU": gpus} if gpus else {}}


ROLES = [Role("trainer and sampler", 1, 8, 4, "trainer.n_gpus_per_node"), Role("teacher t", 2, 4, 4, "num_replicas")]


@pytest.mark.parametrize("nodes, free, words", [
    ([node(8), node(8)], 16, ""),
    ([node(8), node(8), node(0)], 16, ""),
    ([node(4)] * 4, 16, ""),
    ([node(8), node(8, alive=False)], 8, r"trainer and sampler \(8\), teacher t \(8\) are 16 GPUs, and 1 node of 8 have 8"),
    ([node(6), node(6), node(6)], 18, "do not fit on 3 nodes of 6"),
    ([node(8), node(8)], 15, "15 GPUs are free, and the preset needs 16"),
    ([], 0, "no nodes|the largest node has 0"),
])
def test_what_is_missing(nodes, free, words):
    lacks = missing(ROLES, "GPU", nodes, {"GPU": free} if free else {})
    assert re.search(words, lacks) if words else lacks == ""
