"""What a Ray cluster must have before a preset takes it."""

from __future__ import annotations

import pytest

from verl_tinker.engine.nodes import Needs

pytestmark = pytest.mark.timeout(60)


def node(gpus: float, alive: bool = True) -> dict:
    return {"Alive": alive, "Resources": {"GPU": gpus} if gpus else {}}


@pytest.mark.parametrize("nodes, free, words", [
    ([node(8), node(8)], 16, ""),
    ([node(8), node(8), node(0)], 16, ""),
    ([node(8), node(8, alive=False)], 8, "1 of 1 nodes have 8 GPUs, and the preset needs 2"),
    ([node(8), node(4), node(4)], 16, "1 of 3 nodes have 8 GPUs"),
    ([node(8), node(8)], 15, "15 GPUs are free, and the preset needs 16"),
    ([], 0, "0 of 0 nodes"),
])
def test_what_is_missing(nodes, free, words):
    missing = Needs("GPU", nodes=2, per_node=8, total=16).missing(nodes, {"GPU": free} if free else {})
    assert missing.startswith(words) if words else missing == ""
