"""How much an agent may read and say in an episode, and observations cut down to it.

Owns the limits and their check against each other. Does not count tokens: the policy does.
"""

from __future__ import annotations

from dataclasses import dataclass

from harbor_env.errors import SettingError

LEFT_OUT = "(an older observation was left out)"


@dataclass(frozen=True)
class Budget:
    """Tokens, characters and turns; the defaults are those of the quick start."""

    input_tokens: int = 32768
    output_tokens: int = 8192
    context_tokens: int = 65536
    observation_chars: int = 12000
    observations_kept: int = 8
    turns: int = 32

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise SettingError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.input_tokens + self.output_tokens > self.context_tokens:
            raise SettingError(
                f"input_tokens {self.input_tokens} and output_tokens {self.output_tokens} are together more than the "
                f"context of {self.context_tokens} tokens; lower one of them or raise the context length")

    def trimmed(self, messages: list[dict]) -> list[dict]:
        """The messages with each observation cut to its characters and all but the newest ones left out.

        An observation is a tool's message, or a user's after the first answer; the task and the agent's rules stay whole.
        """
        first_answer = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        seen = [i for i, m in enumerate(messages) if i > first_answer and m["role"] in ("tool", "user")]
        old = set(seen[: -self.observations_kept])
        result = []
        for i, message in enumerate(messages):
            if i in old:
                message = {**message, "content": LEFT_OUT}
            elif i > first_answer and message["role"] in ("tool", "user"):
                message = {**message, "content": self._cut(message["content"])}
            result.append(message)
        return result

    def _cut(self, text: str) -> str:
        over = len(text) - self.observation_chars
        if over <= 0:
            return text
        head = self.observation_chars // 2
        tail = self.observation_chars - head
        return f"{text[:head]}\n(... {over} characters were left out ...)\n{text[-tail:]}"
