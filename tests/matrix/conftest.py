"""Runs the driver of every selected (version, flags) pair, two at a time, against one server a set of flags."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest
from server import TestServer

sys.path.insert(0, str(Path(__file__).parent))
from driver import CHUNK  # noqa: E402
from sdk_environments import drive  # noqa: E402


class Servers:
    """One server a set of flags, started when it is first asked for. Cuts batches where SDKs before 0.25 do."""

    def __init__(self, folder: Path):
        self._folder, self._servers, self._lock = folder, {}, Lock()

    def url(self, changed_flags: dict) -> str:
        key = json.dumps(changed_flags, sort_keys=True)
        with self._lock:
            if key not in self._servers:
                flags = {"fwdbwd_max_chunk_len": CHUNK, **changed_flags}
                folder = self._folder / str(len(self._servers))
                self._servers[key] = TestServer(folder, max_runs=1000, changed_flags=flags)
            return self._servers[key].url

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()


@pytest.fixture(scope="session")
def driven(request, tmp_path_factory):
    """(version, flags) -> a future of what the driver saw, for every test that was selected."""
    servers = Servers(tmp_path_factory.mktemp("matrix"))
    wanted = [item.callspec.params for item in request.session.items if "driven" in getattr(item, "fixturenames", ())]
    pool = ThreadPoolExecutor(2)
    try:
        yield {
            (params["version"], str(params["flags"])): pool.submit(
                lambda version, flags: drive(version, servers.url(flags)), params["version"], params["flags"]
            )
            for params in wanted
        }
    finally:
        pool.shutdown(cancel_futures=True)
        servers.stop()
