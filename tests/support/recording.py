"""Exchanges of a client with the server, as text that is the same for every run: recorded, and sent again.

Owns the form: ids as placeholders, protobuf as JSON, equal neighbours in lists counted. Does not judge answers.
"""

from __future__ import annotations

import json
import math
from itertools import groupby
from typing import Any

import zstandard
from google.protobuf.json_format import MessageToDict, ParseDict
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

PREFIX = "/api/v1/"
PROTOBUF = "application/x-protobuf"
HEADERS = ("content-type", "content-encoding", "accept")
DEFAULTS = {"accept": "application/json", "content-type": "application/json"}
# How often these come is a matter of time, or their addresses are signed anew each time.
UNRECORDED = ("session_heartbeat", "telemetry", "cancel_future", "retrieve_futures", "downloads/")
VOLATILE = (
    "time", "created_at", "last_request_time", "expires_at", "expires", "urls", "size_bytes", "clock_cycle:unique"
)


class Recorder:
    """An ASGI app around another; keeps (method, path, headers, body, status, content type, answer), as they end."""

    def __init__(self, app):
        self._app = app
        self.exchanges: list[tuple] = []

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent, got, status, content_type = [], [], 0, ""

        async def listen():
            message = await receive()
            sent.append(message.get("body", b""))
            return message

        async def answer(message):
            nonlocal status, content_type
            if message["type"] == "http.response.start":
                status = message["status"]
                content_type = dict(message["headers"]).get(b"content-type", b"").decode()
            got.append(message.get("body", b""))
            await send(message)

        await self._app(scope, listen, answer)
        headers = {k.decode(): v.decode() for k, v in scope["headers"] if k.decode() in HEADERS}
        query = scope["query_string"].decode()
        path = scope["path"].removeprefix(PREFIX) + ("?" + query if query else "")
        self.exchanges.append((scope["method"], path, headers, b"".join(sent), status, content_type, b"".join(got)))


class Ids:
    """Ids of one run and their placeholders, numbered as the server gives them out."""

    def __init__(self):
        self._placeholders: dict[str, str] = {}

    def learn(self, path: str, answer: Any) -> None:
        for key in ("session_id", "request_id"):
            value = answer.get(key) if isinstance(answer, dict) else None
            if value:
                self._add("session" if key == "session_id" else path, value)
        if path == "copy_weights":
            self._add("copy", answer["tinker_path"].split("/")[2])

    def _add(self, kind: str, value: str) -> None:
        if value not in self._placeholders:
            number = sum(name.startswith(f"<{kind} ") for name in self._placeholders.values())
            self._placeholders[value] = f"<{kind} {number}>"

    def hide(self, value: Any) -> Any:
        return _replace(value, self._placeholders)

    def fill(self, value: Any) -> Any:
        return _replace(value, {name: real for real, name in self._placeholders.items()})


def fixture(exchanges: list[tuple]) -> list[dict]:
    """The recorded exchanges in their stable form, each question once as far as the rest does not build on it."""
    ids, kept, asked, dropped = Ids(), [], set(), set()
    for method, path, headers, body, status, content_type, answer in exchanges:
        if path.startswith(UNRECORDED) or status == 408:
            continue
        request = _read_request(headers, body)
        response = read_answer(ids.hide(request), content_type, answer)
        ids.learn(path, response)
        if path == "asample":
            key = json.dumps({**request, "seq_id": 0}, sort_keys=True)
            if key in asked:
                dropped.add(response["request_id"])
            asked.add(key)
        if {(response or {}).get("request_id"), (request or {}).get("request_id")} & dropped:
            continue
        question = {"method": method, "path": ids.hide(path), "body": ids.hide(request)}
        special = {name: value for name, value in headers.items() if DEFAULTS.get(name) != value}
        answered = {"status": status, "body": stable(path, ids.hide(response))}
        kept.append({"request": {**question, "headers": special}, "answer": answered})
    return [_counted(exchange) for exchange in kept]


def request_of(exchange: dict, ids: Ids) -> dict:
    """The arguments of httpx's `request` for a recorded exchange."""
    request = ids.fill(_expanded(exchange["request"]))
    headers, body = {**DEFAULTS, **request["headers"]}, request["body"]
    if body is None:
        content = b""
    elif headers["content-type"] == PROTOBUF:
        content = ParseDict(body, pb.ForwardBackwardRequest()).SerializeToString()
    else:
        content = json.dumps(body).encode()
    if "content-encoding" in headers:
        content = zstandard.compress(content)
    return {"method": request["method"], "url": request["path"], "headers": headers, "content": content}


def answer_of(exchange: dict) -> dict:
    return _expanded(exchange["answer"])


def read_answer(request: dict | None, content_type: str, answer: bytes) -> Any:
    """An answer as JSON. `request`, with its placeholders, tells which protobuf message it is."""
    if content_type != PROTOBUF:
        return json.loads(answer) if answer else None
    return _sample(answer) if "<asample" in request["request_id"] else _forward_backward(answer)


def stable(path: str, value: Any) -> Any:
    """What may differ between runs by its name; of the flags, only their types."""
    if path.startswith("client/"):
        return {flag: type(setting).__name__ for flag, setting in value.items()}
    if isinstance(value, dict):
        return {k: f"<{k}>" if k in VOLATILE and v is not None else stable(path, v) for k, v in value.items()}
    return [stable(path, item) for item in value] if isinstance(value, list) else value


def differences(expected: Any, actual: Any, where: str = "answer") -> list[str]:
    """Where an answer lacks what is expected; fields beyond it are fine, since clients ignore them."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        missing = [f"{where}.{key} is missing" for key in expected if key not in actual]
        both = [key for key in expected if key in actual]
        return missing + [line for key in both for line in differences(expected[key], actual[key], f"{where}.{key}")]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    same = type(expected) is type(actual) and expected == actual
    if isinstance(expected, float) and isinstance(actual, float):
        # A call's chunks are one sum or several, as they happened to arrive.
        same = math.isclose(expected, actual, rel_tol=1e-6)
    return [] if same else [f"{where} is {actual!r}, not {expected!r}"]


def _sample(answer: bytes) -> dict:
    result = deserialize_sample_response(answer)
    sequences = [{"tokens": s.tokens, "logprobs": s.logprobs, "stop_reason": s.stop_reason} for s in result.sequences]
    prompt = {"prompt_logprobs": result.prompt_logprobs, "topk_prompt_logprobs": result.topk_prompt_logprobs}
    return json.loads(json.dumps({"sequences": sequences, **prompt}))


def _forward_backward(answer: bytes) -> dict:
    result = deserialize_forward_backward_output(answer)
    rows = [
        {name: {"dtype": row.dtype, "shape": list(row.shape), "data": row.tolist()} for name, row in output.items()}
        for output in result.loss_fn_outputs
    ]
    return {"loss_fn_output_type": result.loss_fn_output_type, "loss_fn_outputs": rows, "metrics": result.metrics}


def _read_request(headers: dict, body: bytes) -> Any:
    if headers.get("content-encoding") == "zstd":
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    if headers.get("content-type") == PROTOBUF:
        message = pb.ForwardBackwardRequest.FromString(body)
        return MessageToDict(message, preserving_proto_field_name=True)
    return json.loads(body) if body else None


def _replace(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in names.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {key: _replace(item, names) for key, item in value.items()}
    return [_replace(item, names) for item in value] if isinstance(value, list) else value


def _counted(value: Any) -> Any:
    """Equal neighbours in lists as one item and their number."""
    if isinstance(value, dict):
        return {key: _counted(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    runs = [list(group) for _, group in groupby(value)]
    return [
        part
        for run in runs
        for part in ([{"times": len(run), "of": _counted(run[0])}] if len(run) > 3 else map(_counted, run))
    ]


def _expanded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expanded(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    counted = [item if isinstance(item, dict) and item.keys() == {"times", "of"} else None for item in value]
    return [
        part
        for item, count in zip(value, counted, strict=True)
        for part in ([_expanded(count["of"])] * count["times"] if count else [_expanded(item)])
    ]
