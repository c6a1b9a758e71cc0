"""Every preset of the repository: verl's own classes accept it, it fits where it says, and docs/presets.md is true."""

import functools
import importlib.util
import logging
import re
import warnings

import pytest

from verl_tinker.checks import check_served
from verl_tinker.config import load_config
from verl_tinker.plan.document import PACKAGES, PAGE, ROOT, RUN, packages, page, preset_files
from verl_tinker.plan.report import Cluster, report
from verl_tinker.schema import ConfigError

pytestmark = pytest.mark.timeout(300)
PRESETS = preset_files()
# What verl knows and this server has not: the page says so.
NOT_YET = {f"configs/advance/{name}.yaml" for name in ("megatron_sglang_moe", "veomni_moe")}


@functools.cache
def loaded(path):
    return load_config(path, (), {})


@pytest.mark.parametrize("path", PRESETS)
def test_verls_own_classes_accept_actor_rollout_reference_and_teachers(path):
    config = load_config(path, ["actor_rollout_ref.ref.enable=true"], {})
    config.check_verl()
    for word in packages(config):
        package, module = PACKAGES[word]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            warnings.warn(f"{path} is NOT VALIDATED: {package} is not installed here", stacklevel=1)


def test_the_strategies_and_engines_that_presets_are_for():
    configs = [loaded(path) for path in PRESETS]
    assert {c.actor_rollout_ref.actor.strategy for c in configs} == {"fsdp2", "veomni", "megatron"}
    assert {c.actor_rollout_ref.rollout.name for c in configs if c.has_rollout} == {"vllm", "sglang"}


@pytest.mark.parametrize("path", PRESETS)
def test_a_preset_fits_on_the_gpus_that_it_is_for(path):
    cluster = Cluster(gpu_gib=24.0) if path.endswith("one_gpu.yaml") else Cluster()
    assert report(loaded(path), cluster).problems == []


@pytest.mark.parametrize("path", PRESETS)
def test_a_preset_can_be_started_or_the_page_says_that_it_cannot(path):
    config = loaded(path)
    if path in NOT_YET:
        with pytest.raises(ConfigError, match="it can check such a preset and plan it, not start it"):
            check_served(config)
    else:
        check_served(config)
    row = next(line for line in page_text().splitlines() if line.startswith(f"| `{path}`"))
    assert ("cannot start it yet" in row) == (path in NOT_YET)


def ours(caplog) -> list[logging.LogRecord]:
    """Without what other packages' threads say meanwhile."""
    return [record for record in caplog.records if record.name.startswith("verl_tinker")]


def test_no_preset_of_ours_sets_what_has_no_effect(caplog):
    with caplog.at_level(logging.WARNING, "verl_tinker"):
        for path in PRESETS:
            load_config(path, (), {})
    assert not ours(caplog)


@pytest.mark.parametrize("path", PRESETS)
def test_a_preset_says_what_it_is_for(path):
    assert re.match(r"# \S", (ROOT / path).read_text())


def test_the_page_is_what_the_command_writes():
    assert page_text() == page(), "run python -m verl_tinker.plan.document"
    assert set(RUN) <= set(PRESETS)


def page_text() -> str:
    return PAGE.read_text()


@pytest.mark.parametrize("override, key", [
    ("model.lora_rank=8", "model.lora_rank is 8"), ("model.use_fused_kernels=true", "model.use_fused_kernels is True"),
    ("rollout.data_parallel_size=2", "rollout.data_parallel_size is 2"), ("rollout.quantization=fp8", "quantization is fp8")])
def test_what_the_engine_cannot_work_with_is_refused_at_the_start(override, key):
    config = load_config("configs/quick_start/actor_rollout.yaml", [f"actor_rollout_ref.{override}"], {})
    with pytest.raises(ConfigError, match=f"actor_rollout_ref.*{key}"):
        check_served(config)


@pytest.mark.parametrize("override, told", [
    ("top_p=0.5", True), ("gpu_memory_utilization=0.7", True), ("engine_kwargs.vllm.block_size=16", True),
    ("nnodes=1", True), ("engine_kwargs.vllm.max_logprobs=5", False), ("max_num_seqs=5", False)])
def test_what_has_no_effect_on_a_teacher_is_told_too(caplog, override, told):
    key = f"distillation.teacher_models.tiny.inference.{override}"
    with caplog.at_level(logging.WARNING, "verl_tinker"):
        load_config("configs/distill/cpu.yaml", [key], {})
    assert [f"--set {key}: {key.partition('=')[0]} has no effect here" in record.getMessage() for record in ours(caplog)] \
        == [True] * told


def test_replicas_of_a_teacher_are_kept_together_on_gpus_only():
    packed, several = "distillation.strict_pack=true", "distillation.teacher_models.{}.num_replicas=2"
    check_served(load_config("configs/distill/multi_teacher.yaml", [packed, several.format("qwen3_32b")], {}))
    check_served(load_config("configs/distill/cpu.yaml", [packed], {}))
    with pytest.raises(ConfigError, match="distillation.strict_pack is true, and teacher tiny has several replicas"):
        check_served(load_config("configs/distill/cpu.yaml", [packed, several.format("tiny")], {}))


PROFILER = ["global_profiler.tool=torch", "global_profiler.steps=[1, 5]", "actor_rollout_ref.actor.profiler.enable=true"]


@pytest.mark.parametrize("overrides, text", [
    (["global_profiler.tool=nsys"], "global_profiler.tool is nsys; this server knows torch"),
    (["global_profiler.steps=3"], "global_profiler.steps is 3; it must be a list"),
    (["global_profiler.steps=[0]"], "the first of which is 1"),
    (["global_profiler.step=[1]"], "unknown key global_profiler.step; the nearest is global_profiler.steps"),
    (["global_profiler.profile_continuous_steps=true"], "profile_continuous_steps is true"),
    (PROFILER[1:], "nothing would be traced; set global_profiler.tool=torch"),
    (PROFILER[:2], "nothing would be traced"),
    (PROFILER, "and its all_ranks or ranks"),
])
def test_a_profiler_that_would_trace_nothing_is_one_error(overrides, text):
    with pytest.raises(ConfigError) as caught:
        load_config("configs/quick_start/cpu.yaml", overrides, {})
    assert text in str(caught.value)


def test_the_profiler_reaches_verls_actor_section():
    config = load_config("configs/quick_start/cpu.yaml", [*PROFILER, "actor_rollout_ref.actor.profiler.ranks=[0]"], {})
    profiler = config.actor_rollout_ref.actor.profiler
    assert (profiler.tool, profiler.enable, profiler.save_path) == ("torch", True, config.global_profiler.save_path)
    assert list(config.global_profiler.steps) == [1, 5]
    config.check_verl()


@pytest.mark.parametrize("preset, override, text", [
    ("actor_rollout", "actor.optim.lr=1e-4", "actor.optim.lr has no effect here: each optimizer step of a client"),
    ("actor_rollout", "rollout.temperature=0.5", "rollout.temperature has no effect here: each request"),
    ("actor_rollout", "ref.log_prob_micro_batch_size=3", "ref.log_prob_micro_batch_size has no effect here: no reference"),
    ("cpu", "rollout.engine_kwargs.vllm.block_size=16", "rollout.engine_kwargs.vllm.block_size has no effect here: without"),
    ("actor_rollout", "rollout.engine_kwargs.vllm.block_size=16", None),
    ("actor_rollout", "rollout.temperature=1.0", None),  # as verl's own
    ("actor_rollout", "actor.clip_ratio=0.1", None),
    ("actor_rollout", "ref.enable=true", None),
])
def test_what_has_no_effect_is_told(caplog, preset, override, text):
    with caplog.at_level(logging.WARNING, "verl_tinker"):
        load_config(f"configs/quick_start/{preset}.yaml", [f"actor_rollout_ref.{override}"], {})
    messages = [record.getMessage() for record in ours(caplog)]
    start = f"--set actor_rollout_ref.{override}: actor_rollout_ref.{text}"
    assert not messages if text is None else [message[:len(start)] for message in messages] == [start]


def test_workers_share_sequences_where_the_attention_knows_of_it():
    with pytest.raises(ConfigError, match=r"attn_implementation is sdpa; where workers share a sequence \(actor_rollout_ref.actor"
                                          r".ulysses_sequence_parallel_size\) it must be flash_attention_2"):
        load_config("configs/advance/long_context.yaml", ["actor_rollout_ref.model.override_config.attn_implementation=sdpa"], {})
    assert loaded("configs/advance/long_context.yaml").token_budget == 4 * 32768
