"""One server with the tests' engine and a live session, run and sampler for all made-up requests."""

from types import SimpleNamespace

import pytest
from fake_engine import BASE
from raw import Raw
from server import TestServer
from talking import save_tokenizer

from verl_tinker.chat import Tokenizers


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The server, a raw client, and the ids of what lives there, under the names that requests have for them."""
    tokenizers = Tokenizers({BASE: save_tokenizer(tmp_path_factory.mktemp("tokenizer"))})
    server = TestServer(tmp_path_factory.mktemp("fuzz"), poll_seconds=0.1, allow_shutdown=False, max_runs=4,
                        tokenizers=tokenizers)
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        saved = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=1, path="a")["request_id"])
        names = {
            "session_id": raw.session, "model_id": raw.model, "run_id": raw.model, "base_model": raw.base_model,
            "sampling_session_id": raw.base_sampler(), "sampler_id": raw.base_sampler(),
            "request_id": raw.optim_step(2),
            "tinker_path": saved["path"], "model": BASE, "source_path": saved["path"], "kind": "weights", "name": "a",
        }
        yield SimpleNamespace(server=server, raw=raw, http=http, names=names)
    server.stop()
