"""What the engine relies on in vLLM and verl: parameters of calls, fields of classes, attributes of objects.

Owns the lists. `tests/engine/test_drift.py` holds the installed packages against them; `tools/vllm_signatures.py`
reads the same names out of the vLLM that is pinned for CUDA. Places are `module:qualified name`.
"""

from __future__ import annotations

# Used with either vLLM: the one pinned for CPU and the one pinned for CUDA.
VLLM_CALLS = {
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ["prompt", "sampling_params", "request_id", "lora_request"],
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ["method", "args"],
    "vllm.v1.engine.async_llm:AsyncLLM.remove_lora": ["lora_id"],
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": [],
    "vllm.v1.engine.async_llm:AsyncLLM.check_health": [],
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ["level"],
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ["tags"],
    "vllm.v1.engine.async_llm:AsyncLLM.wait_for_requests_to_drain": [],
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ["timeout"],
    "vllm.v1.worker.worker_base:WorkerBase.get_model": [],
    "vllm.v1.worker.gpu_worker:Worker.get_model": [],
    "vllm.v1.worker.gpu_worker:Worker.add_lora": ["lora_request"],
    "vllm.lora.layers.base:BaseLayerWithLoRA.slice_lora_a": ["lora_a"],
    "vllm.lora.layers.base:BaseLayerWithLoRA.slice_lora_b": ["lora_b"],
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._load_adapter": ["lora_request"],
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA._get_logits": ["hidden_states", "lm_head"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": ["hidden_states", "num_scheduled_tokens"],
    "vllm.v1.sample.sampler:Sampler.compute_logprobs": ["logits"],
    "vllm.v1.engine.exceptions:EngineDeadError.__init__": ["suppress_context"],
    "vllm.outputs:RequestOutput.__init__": ["prompt_logprobs", "outputs", "finished", "lora_request", "num_cached_tokens"],
}
VLLM_FIELDS = {
    "vllm.engine.arg_utils:EngineArgs": [
        "model", "tokenizer", "dtype", "max_model_len", "enforce_eager", "max_num_seqs", "enable_lora",
        "max_num_batched_tokens", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules", "logprobs_mode",
        "max_logprobs", "seed", "disable_log_stats", "block_size", "enable_prefix_caching", "enable_chunked_prefill",
        "tensor_parallel_size", "gpu_memory_utilization", "worker_extension_cls", "enable_sleep_mode"],
    "vllm.sampling_params:SamplingParams": [
        "n", "max_tokens", "seed", "temperature", "top_k", "top_p", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "detokenize", "logprobs", "prompt_logprobs", "skip_special_tokens", "output_kind",
        "extra_args", "flat_logprobs"],
    "vllm.lora.request:LoRARequest": ["lora_name", "lora_int_id", "lora_path"],
    "vllm.outputs:CompletionOutput": ["index", "token_ids", "logprobs", "finish_reason"],
    "vllm.logprobs:FlatLogprobs": ["token_ids", "logprobs"],
    "vllm.v1.outputs:LogprobsTensors": ["logprob_token_ids", "logprobs"],
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": [
        "prompt_token_ids", "sampling_params", "num_computed_tokens", "lora_request"],
}
VLLM_ATTRIBUTES = {
    "vllm.lora.model_manager:LoRAModelManager": ["lora_index_to_id", "packed_modules_mapping", "modules"],
    "vllm.lora.worker_manager:WorkerLoRAManager": ["_adapter_manager"],
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": ["lora_a_stacked", "lora_b_stacked", "tp_size"],
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": ["lora_manager"],
    "vllm.v1.worker.gpu_worker:Worker": ["model_runner"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": [
        "model_config", "num_prompt_logprobs", "lora_config", "requests", "sampler",
        "discard_request_mask", "input_batch"],
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA": ["lora_a_stacked", "lora_b_stacked"],
    "vllm.lora.layers.base:BaseLayerWithLoRA": ["punica_wrapper"],
}
# Used without a GPU only.
VLLM_CPU_CALLS = {
    "vllm.v1.engine.llm_engine:LLMEngine.from_engine_args": ["engine_args"],
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ["request_id", "prompt", "params", "lora_request"],
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ["request_ids"],
    "vllm.v1.engine.llm_engine:LLMEngine.step": [],
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": [],
    "vllm.v1.engine.llm_engine:LLMEngine.remove_lora": ["lora_id"],
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ["method", "timeout", "args"],
    "vllm.v1.engine.llm_engine:LLMEngine.apply_model": ["func"],
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": [],
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata": [
        "mapping", "lora_index_to_id", "max_loras", "vocab_size"],
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": ["lora_request"],
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.sample_tokens": ["grammar_output"],
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ["layer", "remove_weight"],
}
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
VERL_CALLS = {
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": [],
    "verl.workers.rollout.replica:RolloutReplica.init_hybrid": ["worker_group"],
    "verl.workers.rollout.replica:RolloutReplica.init_standalone": [],
    "verl.workers.rollout.replica:RolloutReplica.init_colocated": ["resource_pool"],
    "verl.single_controller.ray.base:RayResourcePool.__init__": ["process_on_nodes", "name_prefix", "max_colocate_count"],
    "verl.single_controller.ray.base:split_resource_pool": ["resource_pool", "split_size"],
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": ["name", "loader"],
    f"{_SERVER}:vLLMReplica.__init__": [
        "replica_rank", "config", "model_config", "gpus_per_node", "is_teacher_model", "name_suffix"],
    f"{_SERVER}:vLLMReplica.launch_servers": [],
    f"{_SERVER}:vLLMReplica.sleep": [],
    f"{_SERVER}:vLLMReplica.wake_up": [],
    f"{_SERVER}:vLLMHttpServer._post_init": ["cuda_visible_devices"],
    f"{_SERVER}:vLLMHttpServer._get_worker_extension_cls": [],
    f"{_SERVER}:vLLMHttpServer._resolve_sleep_level": [],
    "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.monkey_patch_model": [
        "vocab_size", "banned_token_ids"],
    "verl.utils.vllm:resolve_weight_name": ["model", "name", "model_weight_names"],
    f"{_FSDP}:FSDPEngineWithLMHead.prepare_model_outputs": [
        "output", "output_args", "micro_batch", "logits_processor_func"],
    f"{_FSDP}:FSDPEngine.forward_backward_batch": ["data", "loss_function", "forward_only"],
    f"{_FSDP}:FSDPEngine._build_model_optimizer": [],
    f"{_FSDP}:FSDPEngine.optimizer_step": [],
    f"{_FSDP}:FSDPEngine.train_mode": [],
    "verl.utils.ulysses:gather_seq_scatter_heads": ["x", "seq_dim", "head_dim"],
    "verl.utils.ulysses:gather_heads_scatter_seq": ["x", "seq_dim", "head_dim"],
    "verl.utils.ulysses:get_ulysses_sequence_parallel_group": [],
    "verl.utils.ulysses:get_ulysses_sequence_parallel_world_size": [],
    "peft:LoraConfig._register_custom_module": ["mapping"],
    "verl.workers.engine_workers_tinker:_apply_optim_step_params": ["optimizer", "optim_step_params"],
    "verl.utils.distributed:initialize_global_process_group_ray": ["timeout_second", "backend"],
    "verl.utils.profiler:DistProfilerExtension.start_profile": ["kwargs"],
    "verl.utils.profiler:DistProfilerExtension.stop_profile": ["run_command"],
    "verl.plugin.platform:PlatformBase.ray_resource_name": [],
    "multiprocessing.resource_tracker:ResourceTracker._stop": [],
}
