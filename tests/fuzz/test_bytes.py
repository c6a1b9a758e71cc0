"""Damaged protobuf, damaged and hostile frames, wrong types: no 5xx, no hang, no growth."""

from dataclasses import dataclass

import psutil
import pytest
import zstandard
from data import forward_backward_body, rl, sft
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from raw import PROTOBUF, Raw
from server import wait_until
from tinker.proto import tinker_public_pb2 as pb

from verl_tinker.api.body import MAX_BODY

pytestmark = pytest.mark.timeout(900)
TYPES = [PROTOBUF, f"{PROTOBUF}; charset=utf-8", "application/json", "text/plain", "multipart/form-data", ""]
ENCODINGS = ["", "identity", "zstd", "ZSTD", "gzip", "br", "zstd, zstd"]


@dataclass(frozen=True)
class Post:
    content: bytes
    content_type: str
    encoding: str


def bombs() -> list[bytes]:
    """Frames far larger than they look, one that says so and one that does not."""
    size, step, made = 4 * MAX_BODY, bytes(16 << 20), []
    for packer in (zstandard.ZstdCompressor(level=1).compressobj(size=size),
                   zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()):
        made.append(b"".join([*(packer.compress(step) for _ in range(size // len(step))), packer.flush()]))
    return made


BOMBS = bombs()


@st.composite
def messages(draw, model):
    """A valid request, whose fields may then be made senseless while it stays a message."""
    data = draw(st.lists(st.sampled_from([sft(), sft(length=9, weight=-2.0), rl(), rl(length=1)]), max_size=4))
    message = pb.ForwardBackwardRequest.FromString(forward_backward_body(
        draw(st.sampled_from([model, "", "nobody:train:0", model + "0"])), draw(st.integers(-2**31, 2**31 - 1)), data,
        draw(st.sampled_from(["cross_entropy", "ppo", "", "dro", "no such loss"])),
        draw(st.dictionaries(st.text(max_size=5), st.floats(), max_size=2))))
    message.forward_only = draw(st.booleans())
    for datum in message.data if draw(st.booleans()) else ():
        for tensor in datum.loss_fn_inputs.values():
            tensor.dtype = draw(st.sampled_from([0, 1, 2, 3, 4]))
            tensor.shape[:] = draw(st.lists(st.integers(-2**63, 2**63 - 1), max_size=4))
            if draw(st.booleans()):
                parts = [draw(st.binary(max_size=40)) for _ in range(3)]
                tensor.sparse_csr.CopyFrom(pb.SparseCsr(values=parts[0], crow_indices=parts[1], col_indices=parts[2]))
        for chunk in datum.model_input:
            chunk.encoded_text.tokens = draw(st.binary(max_size=40))
    return message.SerializeToString()


@st.composite
def damaged(draw, content):
    content = bytearray(content)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        how = draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if how == "set" and content:
            content[at] = draw(st.integers(0, 255))
        elif how == "insert":
            content[at:at] = draw(st.binary(max_size=8))
        elif how == "delete":
            del content[at:at + draw(st.integers(1, 8))]
        elif how == "cut" and draw(st.booleans()):
            del content[at:]
    return bytes(content)


@st.composite
def posts(draw, model):
    content = draw(st.one_of(messages(model), messages(model).flatmap(damaged), st.binary(max_size=200)))
    encoding = draw(st.sampled_from(ENCODINGS))
    if encoding.lower() == "zstd":
        content = draw(st.one_of(
            st.just(zstandard.ZstdCompressor().compress(content)),
            damaged(zstandard.ZstdCompressor().compress(content)), st.just(content),
            st.sampled_from(BOMBS) if draw(st.integers(0, 19)) == 0 else st.just(b"")))
    return Post(content, draw(st.sampled_from([PROTOBUF, PROTOBUF, PROTOBUF, *TYPES])), encoding)


def send(http, endpoint: str, post: Post):
    headers = {"Content-Type": post.content_type, "Content-Encoding": post.encoding}
    return http.post(endpoint, content=post.content, headers={k: v for k, v in headers.items() if v})


def check(answer):
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert isinstance(answer.json()["detail"], str) and answer.json()["detail"]


def some(examples):
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, phases=(Phase.generate,),
                    suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("examples", [600, pytest.param(5000, marks=pytest.mark.full)])
def test_any_bytes(examples, live):
    """Each is refused or accepted, what is accepted ends, and nothing else is left behind."""
    process, service = psutil.Process(), live.server.service
    sessions, accepted = len(service.sessions.all()), []

    def one(endpoint, post):
        answer = send(live.http, endpoint, post)
        check(answer)
        if answer.status_code == 200 and "request_id" in answer.json():
            accepted.append(answer.json()["request_id"])

    others = ["/optim_step", "/asample", "/retrieve_future", "/telemetry"]
    requests = given(st.sampled_from(["/forward_backward"] * 6 + others), posts(live.raw.model))
    some(100)(requests(one))()
    before = process.memory_info().rss
    some(examples)(requests(one))()
    assert len(accepted) > examples / 10
    wait_until(lambda: not service.futures.pending, 60)
    for request in accepted:
        assert live.http.post("/retrieve_future", json={"request_id": request}).status_code == 200
    assert len(service.sessions.all()) == sessions
    # Two bodies of 64 MiB may be decompressed at a time, and the allocator need not give them back.
    assert process.memory_info().rss - before < 200 << 20
    fresh = Raw(live.http)
    assert "error" not in fresh.create()
    assert fresh.binary(fresh.forward_backward(1)).metrics["loss:sum"] == pytest.approx(4.04)
