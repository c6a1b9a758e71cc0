"""What was sampled for training by sequence id: a ring of recent sequences, for the loss `stable_reinforce`.

Owns the records, their bounds and the refusals of ids that it does not have. Does not compute the loss: the engine does.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import Datum, SampleResult, Span

_PARTS = ("tokens", "logprobs")
DAY_SECONDS = 86400.0
_FIELD = "loss_fn_input_spans"


@dataclass(frozen=True)
class Record:
    """tokens: int32[T], logprobs: float32[T] of the distribution sampled from; `session_id` may train on it."""

    session_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    used_at: float

    @property
    def size(self) -> int:
        return self.tokens.nbytes + self.logprobs.nbytes


class RecordRing:
    """The newest sequences, each for a day after it was sampled or last trained on.

    Beyond `memory_bytes` the oldest half moves into one file; beyond `disk_bytes` the oldest file goes.
    """

    def __init__(self, folder: Path | None, memory_bytes: int = 256 << 20, disk_bytes: int = 4 << 30):
        self._folder = folder
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._size = 0
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._spilled: dict[str, tuple[Path, str, float]] = {}

    def add(self, session_id: str, sequence_ids: Iterable[str], result: SampleResult) -> None:
        now = time.monotonic()
        for sequence_id, sequence in zip(sequence_ids, result.sequences, strict=True):
            record = Record(session_id, sequence.tokens, sequence.logprobs, now)
            self._records[sequence_id] = record
            self._size += record.size
        if self._size > self._memory_bytes:
            self._spill()

    def resolve(self, session_id: str, where: str, datum: Datum) -> Datum:
        """The datum with the recorded log-probabilities as `logprobs`, and advantages at sampled positions only.

        UserError names the span that does not tile, the id that is not known, or the token that was not sampled.
        """
        targets, advantages = datum.inputs.get("target_tokens"), datum.inputs.get("advantages")
        if targets is None or advantages is None or targets.ndim != 1 or advantages.shape != targets.shape:
            return datum  # The check of inputs refuses it with the right words.
        if not datum.spans:
            raise UserError(
                f"{where}.{_FIELD} is missing; stable_reinforce trains on sequences that this server sampled with "
                "record_stability_info=True and that Datum.with_provenance names"
            )
        length = sum(span.length for span in datum.spans)
        if length != len(targets) or any(span.length < 0 or span.offset < 0 for span in datum.spans):
            raise UserError(f"{where}.{_FIELD} covers {length} positions; it must tile the {len(targets)} of target_tokens")
        logprobs, kept, begin = np.zeros(len(targets), np.float32), np.zeros_like(advantages), 0
        for number, span in enumerate(datum.spans):
            here = slice(begin, begin + span.length)
            if span.is_sampled:
                logprobs[here] = self._recorded(session_id, f"{where}.{_FIELD}[{number}]", span, targets[here])
                kept[here] = advantages[here]
            begin += span.length
        return replace(datum, inputs={**datum.inputs, "logprobs": logprobs, "advantages": kept})

    def _recorded(self, session_id: str, where: str, span: Span, targets: np.ndarray) -> np.ndarray:
        record = self._find(session_id, where, span.sequence_id)
        run = slice(span.offset, span.offset + span.length)
        if span.offset + span.length > len(record.tokens):
            raise UserError(
                f"{where} names tokens {span.offset} to {run.stop - 1} of {span.sequence_id}, which has {len(record.tokens)}"
            )
        if (record.tokens[run] != targets).any():
            at = int(np.argmax(record.tokens[run] != targets))
            raise UserError(
                f"{where}: target token {int(targets[at])} is not token {int(record.tokens[run][at])}, which "
                f"{span.sequence_id} sampled at its position {span.offset + at}"
            )
        return record.logprobs[run]

    def _find(self, session_id: str, where: str, sequence_id: str) -> Record:
        record = self._records.get(sequence_id) or self._read(sequence_id)
        if record and time.monotonic() - record.used_at > DAY_SECONDS:
            self._forget(sequence_id)
            record = None
        if record is None or record.session_id != session_id:
            raise UserError(
                f"{where}: sequence_id {sequence_id!r} is not recorded for this session: it was sampled without "
                "record_stability_info, by another session, more than a day ago, before a restart of the server, or so many "
                "sequences ago that its record was dropped. Sample again, or train on it with importance_sampling"
            )
        self._touch(sequence_id, record)
        return record

    def _touch(self, sequence_id: str, record: Record) -> None:
        now = time.monotonic()
        if sequence_id in self._records:
            self._records[sequence_id] = replace(record, used_at=now)
            self._records.move_to_end(sequence_id)
        else:
            file, session_id, _ = self._spilled[sequence_id]
            self._spilled[sequence_id] = (file, session_id, now)

    def _forget(self, sequence_id: str) -> None:
        record = self._records.pop(sequence_id, None)
        self._size -= record.size if record else 0
        self._spilled.pop(sequence_id, None)

    def _spill(self) -> None:
        """Move the oldest half of memory into one file; without a folder, or with a full disk, drop it."""
        oldest: dict[str, Record] = {}
        while self._records and self._size > self._memory_bytes // 2:
            sequence_id, record = self._records.popitem(last=False)
            self._size -= record.size
            oldest[sequence_id] = record
        if self._folder is None:
            return
        arrays = {f"{sequence_id}/{part}": getattr(r, part) for sequence_id, r in oldest.items() for part in _PARTS}
        file = self._folder / f"records-{secrets.token_hex(8)}.safetensors"
        try:
            save_file(arrays, file)
        except (OSError, SafetensorError):
            file.unlink(missing_ok=True)
            return
        self._files[file] = file.stat().st_size
        self._spilled |= {i: (file, record.session_id, record.used_at) for i, record in oldest.items()}
        while sum(self._files.values()) > self._disk_bytes:
            gone, _ = self._files.popitem(last=False)
            gone.unlink(missing_ok=True)
            self._spilled = {i: place for i, place in self._spilled.items() if place[0] != gone}

    def _read(self, sequence_id: str) -> Record | None:
        if sequence_id not in self._spilled:
            return None
        file, session_id, used_at = self._spilled[sequence_id]
        with safe_open(file, framework="numpy") as arrays:
            return Record(session_id, *(arrays.get_tensor(f"{sequence_id}/{part}") for part in _PARTS), used_at)
