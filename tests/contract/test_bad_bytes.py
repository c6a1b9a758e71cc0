"""Malformed, oversized and hostile bodies: 4xx with a JSON detail, and the server lives on."""

import random
import socket
from pathlib import Path

import pytest
import zstandard
from data import forward_backward_body, sft
from raw import PROTOBUF
from recording import Recorder
from server import wait_until
from tinker.proto import tinker_public_pb2 as pb

from verl_tinker.api.body import MAX_BODY, MAX_DATUMS

pytestmark = pytest.mark.timeout(180)

ENDPOINTS = (
    "client/config session_heartbeat create_model get_info forward_backward forward optim_step save_weights "
    "load_weights save_weights_for_sampler create_sampling_session asample retrieve_future weights_info join_sampling_session"
).split()
BODIES = [b"", b"{", b"[]", b"null", b'{"model_id": 5}', b"\xff\xfe", b"[" * 100_000, b'{"session_id": null}']


def check_refusal(answer):
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert isinstance(answer.json()["detail"], str) and answer.json()["detail"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_malformed_json(server, endpoint):
    with server.http() as http:
        for body in BODIES:
            answer = http.post(f"/{endpoint}", content=body, headers={"Content-Type": "application/json"})
            if endpoint != "client/config":
                check_refusal(answer)


def post(http, body, **headers):
    return http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})


def test_malformed_protobuf(raw):
    check_refusal(post(raw.http, b""))
    good = forward_backward_body(raw.model, 1, [sft()])
    rng = random.Random(0)
    for seed in range(100):
        body = bytearray(good)
        if seed % 2:
            del body[rng.randrange(len(body)) :]
        for _ in range(rng.randrange(1, 6)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        assert post(raw.http, bytes(body)).status_code < 500
    raw.model = f"{raw.session}:train:0"
    assert "metrics" in raw.result(raw.forward_backward(10_000))


INT64 = pb.DTYPE_INT64


def int64s(*values) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


LYING = {
    "shape": (pb.Tensor(dtype=INT64, dense=bytes(16), shape=[2, 2]), "do not fill its shape"),
    "half a value": (pb.Tensor(dtype=INT64, dense=bytes(15)), "15 bytes"),
    "huge": (
        pb.Tensor(dtype=INT64, sparse_csr=pb.SparseCsr(crow_indices=bytes(24)), shape=[2, 10**12]),
        "sizes are 0 to",
    ),
    "huge in all": (
        pb.Tensor(dtype=INT64, sparse_csr=pb.SparseCsr(crow_indices=bytes(24)), shape=[2, 2**25]),
        "values in all",
    ),
    "negative": (pb.Tensor(dtype=INT64, dense=bytes(16), shape=[-2, -1]), "0 or more"),
    "rows": (
        pb.Tensor(dtype=INT64, sparse_csr=pb.SparseCsr(crow_indices=int64s(0, 5, 1)), shape=[2, 2]),
        "rising entries",
    ),
    "column": (
        pb.Tensor(
            dtype=INT64,
            sparse_csr=pb.SparseCsr(values=int64s(1), crow_indices=int64s(0, 1, 1), col_indices=int64s(9)),
            shape=[2, 2],
        ),
        "between 0 and 1",
    ),
    "untyped": (pb.Tensor(dense=bytes(16)), "send float32 or int64"),
}


def test_lying_tensors_are_told_by_the_future(raw):
    for seq, (tensor, text) in enumerate(LYING.values(), start=1):
        message = pb.ForwardBackwardRequest(model_id=raw.model, seq_id=seq, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = (1).to_bytes(4, "little") * 2
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
        error = raw.result(post(raw.http, message.SerializeToString()).json()["request_id"])
        assert error["category"] == "user" and text in error["error"], error


def test_compressed_bodies(raw):
    body = forward_backward_body(raw.model, 1, [sft()])
    packed = zstandard.ZstdCompressor().compress(body)
    answer = post(raw.http, packed, **{"Content-Encoding": "zstd"})
    assert raw.binary(answer.json()["request_id"]).metrics["loss:sum"] == pytest.approx(4.04)
    check_refusal(post(raw.http, packed[:-5], **{"Content-Encoding": "zstd"}))
    check_refusal(post(raw.http, b"not zstd", **{"Content-Encoding": "zstd"}))
    check_refusal(post(raw.http, body, **{"Content-Encoding": "br"}))


def test_bombs_are_refused_in_little_memory(raw):
    size = 2 << 30
    claimed = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    step = bytes(16 << 20)
    bombs = []
    for packer in (claimed, silent):
        parts = [packer.compress(step) for _ in range(size // len(step))]
        bombs.append(b"".join([*parts, packer.flush()]))
    raw.forward_backward(1)
    Path("/proc/self/clear_refs").write_text("5")  # Lets the peak count anew.
    before = memory("VmRSS")
    for bomb in bombs:
        assert len(bomb) < 1 << 20
        answer = post(raw.http, bomb, **{"Content-Encoding": "zstd"})
        assert answer.status_code == 413
        check_refusal(answer)
    assert memory("VmHWM") - before < 200 << 20
    assert "metrics" in raw.result(raw.forward_backward(2))


def test_too_many_datums_are_refused_before_they_cost_memory(raw):
    datum = b'{"model_input":{"chunks":[]}},'
    body = b'{"model_id":"m","seq_id":1,"forward_backward_input":{"loss_fn":"cross_entropy","data":[%s]}}'
    answer = raw.http.post("/forward_backward", content=body % (datum * 100_000)[:-1])
    assert answer.status_code == 422 and "forward_backward_input.data" in answer.json()["detail"]
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy", data=[pb.Datum()] * (MAX_DATUMS + 1))
    answer = post(raw.http, message.SerializeToString())
    assert answer.status_code == 400 and f"at most {MAX_DATUMS}" in answer.json()["detail"]


def test_oversized_bodies(raw):
    check_refusal(raw.http.post("/telemetry", content=bytes(MAX_BODY + 1)))

    def stream():
        for _ in range(MAX_BODY // (1 << 20) + 1):
            yield bytes(1 << 20)

    check_refusal(raw.http.post("/telemetry", content=stream()))


def memory(field: str) -> int:
    """A field of this process's memory, which is the server's too, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def test_a_body_that_breaks_off_is_a_refusal_and_no_crash(start_server):
    recorders = []

    def wrap(app):
        recorders.append(Recorder(app))
        return recorders[0]

    address = start_server(wrap=wrap).url.removeprefix("http://").split(":")
    head = "POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(address, 10) as connection:
        connection.sendall(head.encode() + b'{"session')
    wait_until(lambda: recorders[0].exchanges)
    status, answer = recorders[0].exchanges[0][4], recorders[0].exchanges[0][6]
    assert status == 400 and b"before the whole body" in answer
