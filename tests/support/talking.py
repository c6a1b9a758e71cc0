"""A fake engine that answers with text, and the byte-level tokenizer that it shares with the server.

Owns what is said. Does not judge: tests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fake_engine import BASE, VOCAB, FakeEngine

from verl_tinker.core.types import BaseModelInfo, Drawn, SampledSequence, SampleResult, TopK

CONTEXT = 4096
TEACHER = "fake/teacher"
SPECIAL = ["<|im_end|>", "<|im_start|>"]
PLAIN = ["<tool_call>", "</tool_call>"]
END = 256
# Tools first, as most templates have it; tool calls and their results are shown in the form that is asked for.
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if hint is defined %}({{ hint }}) {% endif %}{% endif %}"""


def make_tokenizer(template: str | None = TEMPLATE):
    """One token for each byte, and the marks above: 260 ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    backend = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN])
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    make_tokenizer(template).save_pretrained(folder)
    return folder


class TalkingEngine(FakeEngine):
    """`says` makes the answer of a prompt's text and the weight that answers; every token is scored -0.5."""

    def __init__(self, says: Callable[[str, float], str] = lambda prompt, weight: f"I have weight {weight:g}."):
        super().__init__()
        self.says = says
        self.tokenizer = make_tokenizer()
        self.requests: list = []
        self.pause: tuple | None = None
        self.samples_open = 0
        self.asked: list[str] = []

    def base_models(self):
        return [BaseModelInfo(BASE, CONTEXT, VOCAB, tied_embeddings=False, trainable=True, sampleable=True),
                BaseModelInfo(TEACHER, CONTEXT, VOCAB, tied_embeddings=False, trainable=False, sampleable=True),
                BaseModelInfo("fake/mute", CONTEXT, VOCAB, tied_embeddings=False, trainable=True, sampleable=False)]

    async def sample(self, base_model, version, request, seen=None):
        self.asked.append(base_model)
        self.samples_open += 1
        try:
            result = await super().sample(base_model, version, request)
            if seen is not None:
                await self._draw(result.sequences, seen)
            return result
        finally:
            self.samples_open -= 1

    async def _draw(self, sequences, seen):
        """Token by token; before token `pause[0]` it waits for the event `pause[1]`, and then fails if `pause[2]` says so."""
        for i in range(max(len(s.tokens) for s in sequences)):
            if self.pause and i == self.pause[0]:
                await asyncio.to_thread(self.pause[1].wait, 60)
                if self.pause[2]:
                    raise self.pause[2]
            for index, s in enumerate(sequences):
                topk = s.topk and TopK(s.topk.ids[i : i + 1], s.topk.logprobs[i : i + 1])
                seen(Drawn(index, s.tokens[i : i + 1], s.logprobs[i : i + 1], topk))
            await asyncio.sleep(0)

    def _sampled(self, version, request):
        self.requests.append(request)
        answer = self.says(self.tokenizer.decode(request.prompt), self.versions[version])
        tokens, reason = self._until_stop(answer, request.params)
        k = request.topk_sample_logprobs
        one = SampledSequence(tokens, np.full(len(tokens), -0.5, np.float32), reason, _likeliest(tokens, k) if k else None)
        scores = np.full(len(request.prompt), -1.5, np.float32)
        scores[0] = np.nan
        kp = request.topk_prompt_logprobs
        return SampleResult([one] * request.num_samples, version, scores if request.prompt_logprobs else None,
                            _likeliest(request.prompt, kp) if kp else None, cache_hit_tokens=3)

    def _until_stop(self, answer, params):
        tokens = [*self.tokenizer(answer, add_special_tokens=False).input_ids, END]
        for end in range(1, min(len(tokens), params.max_tokens) + 1):
            text = self.tokenizer.decode(tokens[:end])
            if any(stop in text for stop in params.stop or []) or tokens[end - 1] == END:
                return np.array(tokens[:end], np.int32), "stop"
        return np.array(tokens[: params.max_tokens], np.int32), "length"


def _likeliest(tokens, k: int) -> TopK:
    """The token itself, then the letters a, b and so on."""
    ids = np.tile(np.arange(96, 96 + k, dtype=np.int32), (len(tokens), 1))
    ids[:, 0] = tokens
    return TopK(ids, np.tile(-0.5 - np.arange(k, dtype=np.float32), (len(tokens), 1)))
