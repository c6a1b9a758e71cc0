"""What verl's replica can ask of each vLLM worker process beside verl's own methods.

Owns the names by which `vllm_server` calls them. Does not load anything itself: `vllm_weights` does.
"""

from __future__ import annotations

import sys

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from verl_tinker.engine import prompt_logprobs, vllm_weights
from verl_tinker.engine.fingerprints import Fingerprints


class TinkerWorkerExtension(vLLMColocateWorkerExtension):
    """Becomes a base class of vLLM's worker."""

    def __new__(cls, **kwargs):
        # verl puts a loader of tensors in the place of vLLM's loader of folders. Ours are folders, and verl's loader
        # calls what some versions of vLLM do not have.
        load = LRUCacheWorkerLoRAManager._load_adapter
        instance = super().__new__(cls, **kwargs)
        LRUCacheWorkerLoRAManager._load_adapter = load
        prompt_logprobs.install()
        return instance

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        # verl masks what the tokenizer does not know; the trainer's probabilities are over the whole vocabulary.
        super().monkey_patch_model(vocab_size=sys.maxsize, banned_token_ids=None)

    def load_version_adapter(self, version: int, folder: str) -> tuple[Fingerprints, Fingerprints]:
        return vllm_weights.load_adapter(self, version, folder)

    def load_version_base(self, folder: str) -> tuple[Fingerprints, list[str]]:
        """Digests of the weights received, and the layers that still compute with old ones."""
        model = self.get_model()
        return vllm_weights.load_base_weights(model, folder), vllm_weights.stale_packed_layers(model)
