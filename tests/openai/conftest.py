"""A server that talks, and the official OpenAI client for it."""

from types import SimpleNamespace

import openai
import pytest
from fake_engine import BASE
from raw import Raw
from server import TestServer
from talking import TEACHER, TalkingEngine, save_tokenizer

from verl_tinker.chat import Tokenizers


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def start(tmp_path, tokenizer_folder):
    """Start servers with an engine that talks; they end with the test."""
    servers = []

    def begin(folder=tokenizer_folder, **options):
        options.setdefault("tokenizers", Tokenizers({BASE: folder, TEACHER: folder}))
        servers.append(TestServer(tmp_path / f"server-{len(servers)}", engine=TalkingEngine(), **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def connect():
    """Make OpenAI clients that are closed with the test; they repeat nothing."""
    clients = []

    def make(server, key="tml-test", prefix="/v1", **options):
        clients.append(openai.OpenAI(base_url=server.url + prefix, api_key=key, max_retries=0, timeout=60, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(server, connect):
    return connect(server)


@pytest.fixture
def trained(server):
    """A run of `server` one step from the base model: `path` names its weights, which give another answer."""
    with server.http() as http:
        yield _trained(http)


def _trained(http) -> SimpleNamespace:
    raw = Raw(http)
    raw.create()
    raw.result(raw.forward_backward(1))
    raw.result(raw.optim_step(2))
    saved = raw.post("save_weights_for_sampler", model_id=raw.model, seq_id=3, path="first")
    return SimpleNamespace(raw=raw, path=raw.result(saved["request_id"])["path"])


@pytest.fixture
def train():
    return _trained
