"""A sampler that says what a test wants, in tokens of the model's own tokenizer.

Owns the script. Does not check what it was asked: tests do.
"""

from __future__ import annotations

from harbor_env.policy import Sampled


class ScriptedSampler:
    """Each call gives the next text of the script and the end token; an exception in the script is raised."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.asked = tokenizer, list(script), []

    async def sample(self, prompt, max_tokens, stop):
        self.asked.append((prompt, max_tokens, stop))
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        tokens = list(said) if isinstance(said, (list, tuple)) else self.tokenizer.encode(said) + [stop[0]]
        reason = "length" if len(tokens) > max_tokens or tokens[-1] not in stop else "stop"
        tokens = tokens[:max_tokens]
        return Sampled(tokens, [-0.01 * (i + 1) for i in range(len(tokens))], reason)
