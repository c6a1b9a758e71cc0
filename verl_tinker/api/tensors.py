"""Tensors and token chunks from the wire, as dense numpy arrays.

Owns what both encodings share: shapes, sparse rows, unsupported chunks. Does not check values: the core does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import Matrix

_MAX_DENSE = 32 << 20


def dense(values: np.ndarray, shape: list[int], where: str) -> np.ndarray:
    """Values in C order under a shape; no shape is a flat row."""
    if not shape:
        return values
    _check_shape(shape, where)
    if math.prod(shape) != values.size:
        raise UserError(f"{where} has {values.size} values, which do not fill its shape {shape}")
    return values.reshape(shape)


def densify(values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int], where: str) -> np.ndarray:
    """A sparse CSR matrix with its missing cells as zeros."""
    matrix = csr(values, crow, col, shape, where)
    _check_shape(shape, where)
    full = np.zeros(shape, values.dtype)
    full[matrix.rows(), col] = values
    return full


def csr(values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int], where: str) -> Matrix:
    """A sparse CSR matrix as it came; UserError unless its indices fit its shape."""
    if len(shape) != 2:
        raise UserError(f"{where} is sparse with shape {shape}; a sparse tensor has two dimensions")
    if min(shape) < 0 or max(shape) > _MAX_DENSE:
        raise UserError(f"{where} has shape {shape}; sizes are 0 to {_MAX_DENSE}")
    rows, columns = shape
    counts = np.diff(crow)
    if crow.size != rows + 1 or crow[0] != 0 or (counts < 0).any() or crow[-1] != col.size or col.size != values.size:
        raise UserError(
            f"{where}: crow_indices must have {rows + 1} rising entries that end at the {values.size} values"
        )
    if col.size and (col.min() < 0 or col.max() >= columns):
        raise UserError(f"{where}: col_indices must lie between 0 and {columns - 1}")
    return Matrix(values, (rows, columns), crow, col)


def join_tokens(chunks: Iterable[tuple[str, np.ndarray | None]], where: str) -> np.ndarray:
    """The token ids of text chunks, int32, one after the other; (kind, None) is a chunk that is not text."""
    parts = []
    for index, (kind, tokens) in enumerate(chunks):
        if tokens is None:
            raise UserError(f"{where}.chunks[{index}] is of type {kind!r}; this server takes 'encoded_text' only")
        parts.append(tokens)
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.zeros(0, np.int32)


def from_bytes(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{where} has {len(data)} bytes, not a whole number of {dtype.name} values")
    # The copy is writable, which torch wants of an array that it shares.
    return np.frombuffer(bytearray(data), dtype)


def _check_shape(shape: list[int], where: str) -> None:
    if min(shape) < 0 or math.prod(shape) > _MAX_DENSE:
        raise UserError(f"{where} has shape {shape}; sizes are 0 or more and at most {_MAX_DENSE} values in all")
