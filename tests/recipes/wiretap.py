"""An HTTP proxy that keeps what a recipe asked of the server and what it was answered.

Owns the connections and the exchanges. Reads bodies by the SDK's own message types, not by the server's code; does not judge.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import zstandard
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

SECONDS = 300
_PREFIX = "/api/v1/"
_PROTOBUF = "application/x-protobuf"
_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
# Answers of these endpoints come by retrieve_future in a message of their own.
_READERS = {"asample": deserialize_sample_response, "forward_backward": deserialize_forward_backward_output}


@dataclass
class Call:
    """A request to an endpoint and its result. Training calls have their datums in `data`: `tokens` int32[N], and each
    loss input by its name.
    """

    endpoint: str
    request: Any
    result: Any = None
    data: list[dict[str, np.ndarray]] = field(default_factory=list)

    @property
    def prompt(self) -> np.ndarray:
        chunks = self.request["prompt"]["chunks"]
        return np.concatenate([np.asarray(chunk["tokens"], np.int64) for chunk in chunks])

    @property
    def logprobs(self) -> list[np.ndarray]:
        """What a training call answered for each datum: float32[N] or float32[N, K]."""
        return [np.asarray(row["logprobs"].tolist(), np.float32) for row in self.result.loss_fn_outputs]


class Wiretap:
    """`url` stands for the server at `target` while the block lasts. `calls` are in the order in which they came."""

    def __init__(self, target: str):
        self._netloc = urlsplit(target).netloc
        self._lock = threading.Lock()
        self._by_request: dict[str, Call] = {}
        self.calls: list[Call] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Wiretap:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def to(self, endpoint: str) -> list[Call]:
        return [call for call in self.calls if call.endpoint == endpoint]

    def samples_of(self, path: str | None, base_model: str | None = None) -> list[Call]:
        """The samples that were asked of the sampler at `path`, or of a base model: of any, unless `base_model` names it."""
        ids = {call.result["sampling_session_id"] for call in self.to("create_sampling_session")
               if call.request.get("model_path") == path and base_model in (None, call.request.get("base_model"))}
        return [call for call in self.to("asample") if call.request["sampling_session_id"] in ids]

    def _keep(self, path: str, headers, body: bytes, status: int, content_type: str, answer: bytes) -> None:
        endpoint = path.partition("?")[0].removeprefix(_PREFIX)
        if status != 200:
            return
        if headers.get("content-encoding") == "zstd":
            body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
        if endpoint == "retrieve_future":
            call = self._by_request[json.loads(body)["request_id"]]
            reader = _READERS[call.endpoint] if content_type == _PROTOBUF else json.loads
            call.result = reader(answer)
            return
        if headers.get("content-type") == _PROTOBUF:
            message = pb.ForwardBackwardRequest.FromString(body)
            call = Call(endpoint, message, data=[_datum(datum) for datum in message.data])
        else:
            call = Call(endpoint, json.loads(body) if body else None)
        call.result = json.loads(answer) if content_type == "application/json" and answer else None
        with self._lock:
            self.calls.append(call)
            if isinstance(call.result, dict) and "request_id" in call.result:
                self._by_request[call.result["request_id"]] = call

    def _forward(self, method: str, path: str, headers: dict[str, str], body: bytes):
        connection = HTTPConnection(self._netloc, timeout=SECONDS)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        lower = {name.lower(): value for name, value in headers.items()}
        self._keep(path, lower, body, answer.status, answer.getheader("content-type", ""), content)
        return answer.status, answer.getheaders(), content

    def _handler(tap) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_call(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _OF_ONE_CONNECTION}
                status, answered, content = tap._forward(self.command, self.path, headers, body)
                self.send_response_only(status)
                for name, value in answered:
                    if name.lower() not in _OF_ONE_CONNECTION:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = handle_call  # noqa: N815

            def log_message(self, *args) -> None:
                """Requests hold keys."""

        return Handler


def _datum(datum: pb.Datum) -> dict[str, np.ndarray]:
    chunks = [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input]
    return {"tokens": np.concatenate(chunks), **{name: _tensor(t) for name, t in datum.loss_fn_inputs.items()}}


def _tensor(tensor: pb.Tensor) -> np.ndarray:
    dtype = _DTYPES[tensor.dtype]
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return np.frombuffer(tensor.dense, dtype).reshape(list(tensor.shape) or -1).copy()
    rows, columns = tensor.shape
    values, column = np.frombuffer(tensor.sparse_csr.values, dtype), np.frombuffer(tensor.sparse_csr.col_indices, "<i8")
    counts = np.diff(np.frombuffer(tensor.sparse_csr.crow_indices, "<i8"))
    whole = np.zeros((rows, columns), dtype)
    whole[np.repeat(np.arange(rows), counts), column] = values
    return whole
