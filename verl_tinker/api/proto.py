"""The protobuf side of the wire: forward_backward requests in, training and sampling results out.

Owns the byte layouts. Does not judge content beyond what it takes to read it.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from verl_tinker.api.body import MAX_DATUMS
from verl_tinker.api.tensors import dense, densify, from_bytes, join_tokens
from verl_tinker.core.errors import UserError
from verl_tinker.core.types import Datum, Draws, ForwardBackwardResult, Matrix, SampledSequence, SampleResult, Span, TopK

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_DTYPES = {pb.DTYPE_FLOAT32: _FLOAT32, pb.DTYPE_INT64: _INT64, pb.DTYPE_INT32: _INT32}
_STOP = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """The message, or ValueError when the bytes are not one."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"body is not a ForwardBackwardRequest: {error}") from None
    if not message.model_id:
        raise ValueError("model_id is missing")
    if len(message.data) > MAX_DATUMS:
        raise ValueError(f"data holds {len(message.data)} datums; send at most {MAX_DATUMS} in one request")
    return message


def decode_batch(message: pb.ForwardBackwardRequest) -> tuple[list[Datum], dict[str, float | str]]:
    """The datums and the loss settings; UserError names what cannot be read."""
    data = [_decode_datum(datum, f"data[{i}]") for i, datum in enumerate(message.data)]
    if message.loss_fn_config_v2:
        settings = {key: getattr(v, v.WhichOneof("value") or "number") for key, v in message.loss_fn_config_v2.items()}
    else:
        settings = dict(message.loss_fn_config)
    return data, settings


def encode_forward_backward(result: ForwardBackwardResult) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    # A record holds one trailing shape, so a change from [N] to [N, K] begins a new record.
    for trailing, arrays in groupby(result.logprobs, key=lambda array: array.shape[1:]):
        _add_record(message, list(trailing), list(arrays))
    return message.SerializeToString()


def encode_sample(result: SampleResult) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.cache_hit_tokens)
    for sequence in result.sequences:
        _add_sequence(message, sequence)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype(_FLOAT32).tobytes()
    if result.topk_prompt is not None:
        _fill_topk(message.topk_prompt_logprobs, result.topk_prompt)
    if result.target_prompt is not None:
        _fill_matrix(message.target_prompt_logprobs, result.target_prompt)
    if result.prompt_alt is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, result.prompt_alt.ids, pb.DTYPE_INT64)
        _fill_tensor(message.prompt_alt_tokens.logprobs, result.prompt_alt.logprobs, pb.DTYPE_FLOAT32)
    return message.SerializeToString()


def read_forward_backward(data: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """The log-probabilities of each datum and the metrics, from what `encode_forward_backward` wrote."""
    message = pb.ForwardBackwardOutput.FromString(data)
    logprobs = []
    for record in message.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        offsets = np.frombuffer(tensor.offsets, _INT64)
        for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
            flat = np.frombuffer(tensor.data[begin:end], _FLOAT32)
            logprobs.append(flat.reshape(-1, *tensor.trailing_shape))
    return logprobs, dict(message.metrics)


def read_sample(data: bytes) -> SampleResult:
    """What `encode_sample` wrote; the version is not in it, so it is given as 0."""
    message = pb.SampleResponse.FromString(data)
    names = {number: name for name, number in _STOP.items()}
    sequences = [
        SampledSequence(
            np.frombuffer(s.tokens, _INT32), np.frombuffer(s.logprobs, _FLOAT32), names[s.stop_reason],
            _read_topk(s.topk_sampled_logprobs) if s.HasField("topk_sampled_logprobs") else None)
        for s in message.sequences
    ]
    has = message.HasField
    alternatives = message.prompt_alt_tokens
    return SampleResult(
        sequences,
        0,
        np.frombuffer(message.prompt_logprobs, _FLOAT32) if has("prompt_logprobs") else None,
        _read_topk(message.topk_prompt_logprobs) if has("topk_prompt_logprobs") else None,
        message.prompt_cache_hit_tokens,
        _read_matrix(message.target_prompt_logprobs) if has("target_prompt_logprobs") else None,
        Draws(_read_tensor(alternatives.tokens), _read_tensor(alternatives.logprobs)) if has("prompt_alt_tokens") else None,
    )


def _read_topk(message: pb.TopkLogprobs) -> TopK:
    shape = (message.length, message.k)
    return TopK(np.frombuffer(message.token_ids, _INT32).reshape(shape),
                np.frombuffer(message.logprobs, _FLOAT32).reshape(shape))


def _read_tensor(tensor: pb.Tensor) -> np.ndarray:
    return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).reshape(tuple(tensor.shape))


def _read_matrix(tensor: pb.Tensor) -> Matrix:
    if tensor.WhichOneof("encoding") == "dense":
        return Matrix(_read_tensor(tensor).reshape(-1), tuple(tensor.shape))
    csr = tensor.sparse_csr
    indices = (np.frombuffer(part, _INT64) for part in (csr.crow_indices, csr.col_indices))
    return Matrix(np.frombuffer(csr.values, _DTYPES[tensor.dtype]), tuple(tensor.shape), *indices)


def _decode_datum(datum: pb.Datum, where: str) -> Datum:
    field = f"{where}.model_input"
    tokens = join_tokens((_decode_chunk(chunk, field) for chunk in datum.model_input), field)
    inputs = {
        name: _decode_tensor(tensor, f"{where}.loss_fn_inputs[{name!r}]")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(tokens, inputs, tuple(_decode_span(span, where) for span in datum.loss_fn_input_spans))


def _decode_span(span: pb.ProvenanceSpan, where: str) -> Span:
    kind = span.WhichOneof("span")
    if kind is None:
        raise UserError(f"{where}.loss_fn_input_spans holds a span of no kind; send prompt_tokens or sampled_tokens")
    run = getattr(span, kind)
    return Span(run.sequence_id, run.offset, run.length, kind == "sampled_tokens")


def _decode_chunk(chunk: pb.Chunk, where: str) -> tuple[str, np.ndarray | None]:
    kind = chunk.WhichOneof("chunk") or "empty"
    return kind, from_bytes(chunk.encoded_text.tokens, _INT32, where) if kind == "encoded_text" else None


def _decode_tensor(tensor: pb.Tensor, where: str) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{where} has dtype {tensor.dtype}; send float32 or int64")
    shape = list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        values = from_bytes(csr.values, dtype, where)
        crow, col = (from_bytes(part, _INT64, where) for part in (csr.crow_indices, csr.col_indices))
        return densify(values, crow, col, shape, where)
    return dense(from_bytes(tensor.dense, dtype, where), shape, where)


def _add_record(message: pb.ForwardBackwardOutput, trailing: list[int], arrays: list[np.ndarray]) -> None:
    record = message.loss_fn_outputs.add(num_datums=len(arrays))
    blobs = [array.astype(_FLOAT32).tobytes() for array in arrays]
    offsets = np.cumsum([0, *(len(blob) for blob in blobs)], dtype=_INT64)
    tensor = record.fields["logprobs"]
    tensor.data = b"".join(blobs)
    tensor.offsets = offsets.tobytes()
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.trailing_shape.extend(trailing)


def _add_sequence(message: pb.SampleResponse, sequence: SampledSequence) -> None:
    added = message.sequences.add(
        stop_reason=_STOP[sequence.stop_reason],
        tokens=sequence.tokens.astype(_INT32).tobytes(),
        logprobs=sequence.logprobs.astype(_FLOAT32).tobytes(),
    )
    if sequence.topk is not None:
        _fill_topk(added.topk_sampled_logprobs, sequence.topk)


def _fill_topk(message: pb.TopkLogprobs, topk: TopK) -> None:
    message.length, message.k = topk.ids.shape
    message.token_ids = topk.ids.astype(_INT32).tobytes()
    message.logprobs = topk.logprobs.astype(_FLOAT32).tobytes()


def _fill_tensor(message: pb.Tensor, array: np.ndarray, dtype: int) -> None:
    message.dense = array.astype(_DTYPES[dtype]).tobytes()
    message.dtype = dtype
    message.shape.extend(array.shape)


def _fill_matrix(message: pb.Tensor, matrix: Matrix) -> None:
    if matrix.crow_indices is None:
        _fill_tensor(message, matrix.values.reshape(matrix.shape), pb.DTYPE_FLOAT32)
        return
    message.sparse_csr.values = matrix.values.astype(_FLOAT32).tobytes()
    message.sparse_csr.crow_indices = matrix.crow_indices.astype(_INT64).tobytes()
    message.sparse_csr.col_indices = matrix.col_indices.astype(_INT64).tobytes()
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(matrix.shape)
