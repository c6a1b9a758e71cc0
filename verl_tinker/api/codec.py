"""Results as bytes: what futures keep, and what goes over the wire.

Owns the choice of the kept form. Does not know HTTP: `verl_tinker.api.results` makes answers of it.
"""

from __future__ import annotations

import json
from typing import Any

from verl_tinker.api import proto
from verl_tinker.core.futures import Encoded
from verl_tinker.core.types import ForwardBackwardResult, SampleResult

FORWARD_BACKWARD, SAMPLE, JSON = "forward_backward", "sample", "json"
_PER_TOKEN = 16


class WireCodec:
    """Array results as protobuf, which every SDK reads; all others as JSON. See `verl_tinker.core.futures.Codec`."""

    def size(self, result: Any) -> int:
        if isinstance(result, ForwardBackwardResult):
            return sum(array.nbytes for array in result.logprobs)
        if isinstance(result, SampleResult):
            prompt = 0 if result.prompt_logprobs is None else len(result.prompt_logprobs)
            tables = [t.ids.nbytes * 2 for t in (result.topk_prompt, result.prompt_alt) if t is not None]
            targets = 0 if result.target_prompt is None else len(result.target_prompt.values)
            return sum(tables) + _PER_TOKEN * (prompt + targets + sum(len(s.tokens) for s in result.sequences))
        return 0

    def encode(self, result: Any) -> Encoded:
        if isinstance(result, ForwardBackwardResult):
            return Encoded(FORWARD_BACKWARD, proto.encode_forward_backward(result))
        if isinstance(result, SampleResult):
            return Encoded(SAMPLE, proto.encode_sample(result))
        return Encoded(JSON, json.dumps(result).encode())
