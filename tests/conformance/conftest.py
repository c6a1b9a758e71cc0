"""The server under test: any base URL, or a process with the tests' engine when none is given.

    pytest tests/conformance --base-url http://... --api-key tml-... [--model NAME] [--tolerance NATS]
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker

sys.path.insert(0, str(Path(__file__).parent))

from dropping_proxy import DroppingProxy  # noqa: E402
from programs import SECONDS, Wire, now  # noqa: E402


def pytest_addoption(parser):
    group = parser.getgroup("conformance", "conformance kit")
    group.addoption("--base-url", help="the server under test; one with the tests' engine is started when absent")
    group.addoption("--api-key", help="its API key, tml-...; TINKER_API_KEY when absent")
    group.addoption("--model", help="a base model to train and sample; the first that the server names when absent")
    group.addoption("--tolerance", type=float, help="nats between equal log-probabilities; 1e-3 when absent")


@dataclass(frozen=True)
class Target:
    """`tolerance`: nats. What must differ has to differ by ten times as much."""

    url: str
    key: str
    model: str
    tolerance: float

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/v1/", headers={"X-API-Key": self.key}, timeout=SECONDS)

    def same(self, one, other) -> bool:
        return abs(one - other).max() <= self.tolerance

    def differ(self, one, other) -> bool:
        return abs(one - other).max() > 10 * self.tolerance


@pytest.fixture(scope="session")
def target(request, tmp_path_factory):
    option = request.config.getoption
    key = option("api_key", None) or os.environ.get("TINKER_API_KEY", "tml-conformance")
    with contextlib.ExitStack() as stack:
        url = option("base_url", None)
        if url is None:
            from fake_server import FakeServer

            server = FakeServer(tmp_path_factory.mktemp("conformance")).start()
            stack.callback(server.stop)
            url = server.url
        url = url.rstrip("/")
        yield Target(url, key, option("model", None) or first_model(url, key), option("tolerance", None) or 1e-3)


def first_model(url: str, key: str) -> str:
    models = now(tinker.RestClient(base_url=url, api_key=key).get_server_capabilities()).supported_models
    return next(m.model_name for m in models if m.trainable is not False and m.sampleable is not False)


@pytest.fixture
def proxy(target):
    made = DroppingProxy(target.url)
    yield made
    made.close()


@pytest.fixture
def connect(target, proxy):
    """SDK clients, of the server or of the proxy before it, that end with the test and make room for the next."""
    clients = []

    def make(url=None):
        clients.append(tinker.ServiceClient(base_url=url or target.url, api_key=target.key))
        return clients[-1]

    yield make
    for client in clients:
        now(client.close("success"))


@pytest.fixture
def service(connect):
    return connect()


@pytest.fixture
def new_run(service, target):
    """Runs that begin alike: the same adapter, the same seed."""

    def make(of=None):
        return now((of or service).create_lora_training_client(target.model, rank=8, seed=1, train_unembed=False))

    return make


@pytest.fixture
def rest(target):
    return tinker.RestClient(base_url=target.url, api_key=target.key)


@pytest.fixture
def http(target):
    with target.http() as client:
        yield client


@pytest.fixture
def wire(http, target):
    made = Wire(http, target.model)
    made.create()
    yield made
    http.post(f"sessions/{made.session}/finish", json={"reason": {"type": "success"}})
