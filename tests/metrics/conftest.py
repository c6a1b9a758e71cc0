"""Servers with the fake engine, and a raw client with a live run."""

import pytest
from raw import Raw
from server import TestServer


@pytest.fixture
def start(tmp_path):
    servers = []

    def begin(**options):
        servers.append(TestServer(tmp_path / f"server-{len(servers)}", **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def raw(server):
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        yield raw
