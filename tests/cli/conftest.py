"""Servers that talk, and the command `verl-tinker` in this process."""

import json

import pytest
from click.testing import CliRunner
from fake_engine import BASE
from raw import Raw
from server import servers_in
from talking import TalkingEngine, save_tokenizer

from verl_tinker.chat import Tokenizers
from verl_tinker.cli import cli


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def start(tmp_path, tokenizer_folder):
    with servers_in(tmp_path, engine=TalkingEngine, tokenizers=lambda: Tokenizers({BASE: tokenizer_folder})) as begin:
        yield begin


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def raw(server):
    """A client with a live run that has made one step and saved its state and its sampler weights."""
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        raw.result(raw.forward_backward(1))
        raw.result(raw.optim_step(2))
        raw.state = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=3, path="a")["request_id"])["path"]
        named = raw.post("save_weights_for_sampler", model_id=raw.model, seq_id=4, path="b")
        raw.weights = raw.result(named["request_id"])["path"]
        yield raw


class Command:
    """Calls the command with a server's address in the environment."""

    def __init__(self, url="", key="tml-test"):
        self.environ = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "COLUMNS": "200"}

    def __call__(self, *arguments, status=0, input=None):
        result = CliRunner().invoke(cli, [str(a) for a in arguments], input=input, env=self.environ)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == status, result.output
        return result

    def json(self, *arguments, **options):
        return json.loads(self(*arguments, "--json", **options).stdout)


@pytest.fixture
def command(server):
    return Command(server.url)


@pytest.fixture
def command_for():
    return Command
