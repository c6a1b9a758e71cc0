"""Servers with the fake engine, and real SDK clients for them."""

import pytest
import tinker
from fake_engine import BASE
from raw import Raw
from server import TestServer


@pytest.fixture
def start_server(tmp_path):
    """Start servers that end with the test; all share one checkpoint folder."""
    servers = []

    def start(**options):
        servers.append(TestServer(tmp_path / "checkpoints", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start_server):
    return start_server()


@pytest.fixture
def connect():
    """Make SDK clients that are closed with the test."""
    clients = []

    def make(server):
        clients.append(tinker.ServiceClient(base_url=server.url))
        return clients[-1]

    yield make
    for client in clients:
        client.close("success").result(10)


@pytest.fixture
def client(server, connect):
    return connect(server)


@pytest.fixture
def training(client):
    return client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result(20)


@pytest.fixture
def raw(server):
    """A raw client of `server` with a live model."""
    with server.http() as http:
        raw = Raw(http)
        assert raw.create() == {"model_id": raw.model, "type": "create_model"}
        yield raw
