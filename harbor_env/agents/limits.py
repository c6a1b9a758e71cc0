"""An agent's budget as the job file gives it, and what every agent here does with it.

Owns the names of the arguments. Runs inside the sandbox, in Harbor's process, beside Harbor's own code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Limits:
    """`api_base` is the model service's address for the task's container, `runtime` the folder with the baked agent."""

    api_base: str
    runtime: str = "/opt/agent-runtime"
    max_input_tokens: int = 32768
    max_output_tokens: int = 8192
    per_instance_call_limit: int = 32
    temperature: float = 1.0
    completion_kwargs: dict[str, Any] = field(default_factory=dict)
    max_observation_length: int = 12000
    last_n_observations: int = 8

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Limits:
        """Takes its own out of the arguments of an agent's constructor."""
        return cls(**{f.name: arguments.pop(f.name) for f in fields(cls) if f.name in arguments})

    @property
    def completion_json(self) -> str:
        return json.dumps(self.completion_kwargs)

    def cut(self, text: str) -> str:
        """An observation within its characters, both ends kept."""
        over = len(text) - self.max_observation_length
        half = self.max_observation_length // 2
        return text if over <= 0 else f"{text[:half]}\n(... {over} characters left out ...)\n{text[-half:]}"
