"""Waiting for a worker: with a limit, and with Ray's errors turned into ours.

Owns the texts by which clients learn that a worker refused, failed, died or did not answer. Does not call workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray

from verl_tinker.core.errors import EngineError, TinkerError, Unresponsive, WorkerDied


async def answer_of(who: str, method: str, waiting: Awaitable, limit_s: float) -> Any:
    """The worker's answer; its own refusal, or an EngineError that names `who` and `method`."""
    try:
        return await asyncio.wait_for(_awaited(waiting), limit_s)
    except TimeoutError:
        raise Unresponsive(f"{who} did not answer {method} within {limit_s:.0f} s") from None
    except ray.exceptions.RayTaskError as error:
        # What Ray raises may be our type too, but its text is a traceback.
        raise _cause(error, who, method) from error
    except ray.exceptions.RayActorError as error:
        raise WorkerDied(f"{who}'s process died ({death_reason(error)})") from error


async def _awaited(waiting: Awaitable) -> Any:
    return await waiting


def _cause(error: ray.exceptions.RayTaskError, who: str, method: str) -> TinkerError:
    cause = getattr(error, "cause", None)
    for kind in type(cause).__mro__ if cause is not None else ():
        if issubclass(kind, TinkerError) and kind.__module__ == TinkerError.__module__:
            return kind(str(cause).splitlines()[-1] if isinstance(cause, ray.exceptions.RayTaskError) else str(cause))
    return EngineError(f"{who} failed in {method}: {str(error).strip().splitlines()[-1]}")


def death_reason(error: ray.exceptions.RayActorError) -> str:
    """Why Ray says a worker died, in a line: its own text goes on about every process of the machine."""
    text = (error.error_msg or "no message").strip()
    # The words of Ray's memory monitor; its text for any other death lists the lack of memory as a possibility too.
    if "running low on memory" in text or "memory usage threshold" in text:
        return "the machine ran short of memory; end other programs, or use a smaller model or shorter batches"
    return text.splitlines()[0][:300]
