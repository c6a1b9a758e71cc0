"""Every signature of vLLM and verl that the engine relies on, so that an upgrade names what moved."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

pytestmark = pytest.mark.timeout(120)

CALLS = {
    "vllm.v1.engine.llm_engine:LLMEngine.from_engine_args": ["engine_args"],
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ["request_id", "prompt", "params", "lora_request"],
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ["request_ids"],
    "vllm.v1.engine.llm_engine:LLMEngine.step": [],
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": [],
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora": ["lora_request"],
    "vllm.v1.engine.llm_engine:LLMEngine.remove_lora": ["lora_id"],
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ["method", "timeout", "args"],
    "vllm.v1.engine.llm_engine:LLMEngine.apply_model": ["func"],
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": [],
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata": [
        "mapping", "lora_index_to_id", "max_loras", "vocab_size"],
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": ["lora_request"],
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ["layer", "remove_weight"],
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": [],
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": ["name", "loader"],
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs": [
        "output", "output_args", "micro_batch", "logits_processor_func"],
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch": ["data", "loss_function", "forward_only"],
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_model_optimizer": [],
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step": [],
    "verl.workers.engine_workers_tinker:_apply_optim_step_params": ["optimizer", "optim_step_params"],
    "verl.utils.distributed:initialize_global_process_group_ray": ["timeout_second", "backend"],
}
FIELDS = {
    "vllm:EngineArgs": ["model", "tokenizer", "dtype", "max_model_len", "enforce_eager", "max_num_seqs", "enable_lora",
                        "max_num_batched_tokens", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules",
                        "logprobs_mode", "max_logprobs", "seed", "disable_log_stats", "enable_prefix_caching",
                        "enable_chunked_prefill", "tensor_parallel_size", "gpu_memory_utilization"],
    "vllm:SamplingParams": ["n", "max_tokens", "seed", "temperature", "top_k", "top_p", "stop", "stop_token_ids",
                            "ignore_eos", "include_stop_str_in_output", "detokenize", "logprobs", "prompt_logprobs",
                            "skip_special_tokens", "output_kind"],
    "vllm.lora.request:LoRARequest": ["lora_name", "lora_int_id", "lora_path"],
}


def resolve(place: str):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("place", CALLS)
def test_a_call_takes_what_is_passed(place):
    parameters = inspect.signature(resolve(place)).parameters
    missing = [name for name in CALLS[place] if name not in parameters]
    assert not missing, f"{place}{inspect.signature(resolve(place))} has no {missing}"


@pytest.mark.parametrize("place", FIELDS)
def test_a_settings_class_has_the_fields_that_are_set(place):
    cls = resolve(place)
    known = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set(cls.__struct_fields__)
    assert set(FIELDS[place]) <= known, sorted(set(FIELDS[place]) - known)


def test_the_lora_layers_hold_their_weights_where_the_read_back_looks():
    from vllm.lora.model_manager import LoRAModelManager

    source = inspect.getsource(LoRAModelManager)
    for name in ("lora_index_to_id", "packed_modules_mapping", "self.modules"):
        assert name in source, f"LoRAModelManager has no {name} any more"
