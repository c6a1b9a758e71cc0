"""A Ray cluster of several nodes on this machine, on loopback, by Ray's own utility for such tests.

Owns the nodes and their folder. Does not connect to them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster


class Nodes:
    """`ray start --address` refuses a node on loopback; this does not."""

    def __init__(self, cpus: int):
        # Ray puts sockets below it, whose path may not exceed 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="vtn-", dir="/tmp"))
        (self.folder / "ray").mkdir()
        self.settings = {"node_ip_address": "127.0.0.1", "num_gpus": 0, "object_store_memory": 200 * 2**20,
                         "include_dashboard": False, "temp_dir": str(self.folder / "ray")}
        # Where the utility notes the cluster's address for whoever looks for one; nobody else is to find it.
        os.environ["RAY_TMPDIR"] = str(self.folder)
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, **self.settings})
        self.address = self.cluster.address

    def add(self, cpus: int):
        return self.cluster.add_node(num_cpus=cpus, **self.settings)

    def kill(self, node) -> None:
        """As if the machine had lost its power."""
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()
        os.environ.pop("RAY_TMPDIR", None)
        shutil.rmtree(self.folder, ignore_errors=True)
