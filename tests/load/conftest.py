"""Server processes with the tests' engine, for traffic of many clients."""

import pytest
from fake_server import FakeServer


@pytest.fixture
def start_process(tmp_path):
    """Start server processes that end with the test, each with a folder of its own."""
    servers = []

    def start(*arguments):
        servers.append(FakeServer(tmp_path / f"server-{len(servers)}", *arguments).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
