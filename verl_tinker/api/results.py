"""Settled futures as HTTP answers, protobuf where the client accepts it, else JSON.

Owns the shapes of results. Does not wait for them: `verl_tinker.api.routes_futures` does.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse

from verl_tinker.api import codec, proto
from verl_tinker.core.futures import Future
from verl_tinker.core.types import EMPTY_CELL, Matrix, SampleResult, TopK

PROTOBUF = "application/x-protobuf"


def answer(future: Future, accept: str) -> Response:
    """The answer of a settled future; FileNotFoundError when its result has just been dropped."""
    if future.error is not None:
        return JSONResponse({"error": future.error.told, "category": future.error.category})
    encoded = future.result
    if encoded.form == codec.JSON:
        result = json.loads(encoded.data)
        return JSONResponse({**result, "type": future.kind, **_metrics(result)})
    if PROTOBUF in accept:
        return Response(encoded.data, media_type=PROTOBUF)
    if encoded.form == codec.FORWARD_BACKWARD:
        return JSONResponse(_forward_backward(*proto.read_forward_backward(encoded.data)))
    return JSONResponse(_sample(proto.read_sample(encoded.data)))


def not_yet(future: Future) -> JSONResponse:
    """408 makes the SDK poll again at once without a word; the body tells it what the work waits for."""
    body = {"type": "try_again", "request_id": future.request_id, "queue_state": "active"}
    return JSONResponse({**body, "queue_state_reason": future.state()}, 408)


def _metrics(result: dict) -> dict:
    return {"metrics": _numbers(result["metrics"])} if "metrics" in result else {}


def _numbers(metrics: dict[str, float]) -> dict[str, Any]:
    """Strict JSON has no NaN; its name as text is read as the number by the client."""
    return {key: float(v) if math.isfinite(v) else str(float(v)) for key, v in metrics.items()}


def _forward_backward(logprobs: list[np.ndarray], metrics: dict[str, float]) -> dict:
    outputs = [{"logprobs": _tensor(Matrix(array.ravel(), array.shape))} for array in logprobs]
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": outputs,
        "metrics": _numbers(metrics),
    }


def _sample(result: SampleResult) -> dict:
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {"stop_reason": s.stop_reason, "tokens": s.tokens.tolist(), "logprobs": _floats(s.logprobs)}
            for s in result.sequences
        ],
        "prompt_cache_hit_tokens": result.cache_hit_tokens,
    }
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = _floats(result.prompt_logprobs)
    if result.topk_prompt is not None:
        body["topk_prompt_logprobs"] = _rows(result.topk_prompt)
    if result.target_prompt is not None:
        body["target_prompt_logprobs"] = _tensor(result.target_prompt)
    if result.prompt_alt is not None:
        drawn = {"tokens": result.prompt_alt.ids, "logprobs": result.prompt_alt.logprobs}
        body["prompt_alt_tokens"] = {name: _tensor(Matrix(a.ravel(), a.shape)) for name, a in drawn.items()}
    return body


def _tensor(matrix: Matrix) -> dict[str, Any]:
    whole = matrix.values.dtype.kind == "i"
    body = {"data": matrix.values.tolist() if whole else _floats(matrix.values),
            "dtype": "int64" if whole else "float32", "shape": list(matrix.shape)}
    if matrix.crow_indices is not None:
        body |= {"sparse_crow_indices": matrix.crow_indices.tolist(), "sparse_col_indices": matrix.col_indices.tolist()}
    return body


def _rows(topk: TopK) -> list:
    rows = []
    for ids, logprobs in zip(topk.ids.tolist(), topk.logprobs.tolist(), strict=True):
        cells = [[i, p] for i, p in zip(ids, logprobs, strict=True) if p > EMPTY_CELL]
        rows.append(cells or None)
    return rows


def _floats(values: np.ndarray) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]
