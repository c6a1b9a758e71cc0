"""The `distillation` section: which teachers there are, in which order, and what its refusals say."""

from pathlib import Path

import pytest

from verl_tinker.checks import check_served
from verl_tinker.config import load_config
from verl_tinker.schema import ConfigError

CPU, ACTOR = "configs/distill/cpu.yaml", "HuggingFaceTB/SmolLM2-135M-Instruct"
GPU = """
device: cuda
server: {model_name: a/student}
trainer: {n_gpus_per_node: 4}
distillation:
  enabled: true
  teacher_models:
    small: {model_path: org/small, num_replicas: 2, inference: {tensor_model_parallel_size: 2}}
    large: {model_name: the/large, model_path: org/large, inference: {tensor_model_parallel_size: 8}}
actor_rollout_ref:
  actor: {strategy: fsdp2, use_dynamic_bsz: true}
  rollout: {name: vllm, dtype: float16, temperature: 0.7}
"""


@pytest.fixture
def gpu(tmp_path) -> str:
    (tmp_path / "gpu.yaml").write_text(GPU)
    return str(tmp_path / "gpu.yaml")


def load(path=CPU, *overrides, **environ):
    return load_config(path, overrides, environ)


def refusal(path, *overrides, **environ):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def of(entry, key, value=None):
    return f"distillation.teacher_models.{entry}.{key}" + ("" if value is None else f"={value}")


def test_the_cpu_preset_has_two_teachers_beside_the_actor():
    config = load()
    assert dict(config.models) == {ACTOR: "bundled:smollm2"}
    assert [(t.name, t.path, t.num_replicas, t.world_size) for t in config.teachers] == [
        ("teachers/SmolLM2-135M-Instruct", "bundled:smollm2", 1, 1), ("teachers/tiny", "bundled:tiny", 1, 1)]
    for teacher in config.teachers:
        assert (teacher.rollout.name, teacher.rollout.dtype, teacher.rollout.max_model_len) == ("vllm", "float32", 2048)
        assert teacher.max_logprobs == 128
    assert config.cpu.teacher_kv_cache_gb == 1


def test_a_preset_without_the_section_has_none():
    config = load("configs/quick_start/cpu.yaml")
    assert config.teachers == () and not config.distillation.enabled


def test_teachers_are_ignored_only_when_the_section_says_so():
    assert load(CPU, "distillation.enabled=false").teachers == ()


def test_the_largest_replica_is_placed_first(gpu):
    config = load(gpu)
    assert [(t.entry, t.key, t.name, t.replica_size, t.world_size) for t in config.teachers] == [
        ("large", "large", "the/large", 8, 8), ("small", "small", "org/small", 2, 4)]


def test_verls_defaults_for_teachers_fill_what_the_preset_leaves_out(gpu):
    large = load(gpu).teachers[0].rollout
    assert (large.name, large.dtype, large.temperature) == ("vllm", "float16", 0.7)  # as the actor's
    assert (large.gpu_memory_utilization, large.max_num_seqs, large.load_format) == (0.5, 1024, "auto")  # of a teacher
    assert (large.logprobs_mode, large.n_gpus_per_node) == ("processed_logprobs", 8)  # of any rollout


def test_an_only_teacher_without_a_number_of_replicas_fills_the_pool(gpu):
    only = [of("large", "inference.tensor_model_parallel_size", 2), "distillation.nnodes=1",
            "distillation.n_gpus_per_node=4"]
    text = Path(gpu).read_text().replace("    small: {model_path: org/small, num_replicas: 2, "
                                         "inference: {tensor_model_parallel_size: 2}}\n", "")
    Path(gpu).write_text(text)
    assert load(gpu, *only).teachers[0].num_replicas == 2
    assert load(gpu, *only, of("large", "num_replicas", 1)).teachers[0].num_replicas == 1
    assert load(gpu, *only, "distillation.nnodes=0").teachers[0].num_replicas == 1


def test_the_environment_names_an_only_teacher(gpu):
    text = Path(gpu).read_text()
    Path(gpu).write_text("\n".join(line for line in text.splitlines() if not line.startswith("    small:")))
    teacher = load(gpu, TINKER_TEACHER_MODEL_NAME="my/teacher", TINKER_TEACHER_MODEL_PATH="org/other").teachers[0]
    assert (teacher.name, teacher.path) == ("my/teacher", "org/other")
    assert load(gpu, of("large", "model_name", "mine"), TINKER_TEACHER_MODEL_NAME="x").teachers[0].name == "mine"
    message = refusal(CPU, TINKER_TEACHER_MODEL_NAME="x")
    assert message.startswith("TINKER_TEACHER_MODEL_NAME: ") and "smollm2, tiny" in message
    assert "the preset has none" in refusal("configs/quick_start/cpu.yaml", TINKER_TEACHER_MODEL_PATH="x")


def test_a_teacher_may_have_the_weights_of_the_actor_and_of_another_teacher():
    config = load(CPU, of("tiny", "model_path", "bundled:smollm2"))
    assert {t.path for t in config.teachers} == set(config.models.values()) == {"bundled:smollm2"}
    # Their path means the first of them.
    assert [t.names for t in config.teachers] == [("teachers/SmolLM2-135M-Instruct", "bundled:smollm2"), ("teachers/tiny",)]


def test_teachers_answer_to_name_and_path(gpu):
    assert [t.names for t in load(gpu).teachers] == [("the/large", "org/large"), ("org/small",)]
    config = load(gpu, "server.model_name=org/large")
    assert config.teachers[0].names == ("the/large",) and "org/large" in config.models


@pytest.mark.parametrize("override, text", [
    (of("tiny", "model_name", ACTOR), f"tiny.model_name is {ACTOR}, and so is server.model_name; give each model a name"),
    (of("tiny", "model_name", "teachers/SmolLM2-135M-Instruct"), "and so is distillation.teacher_models.smollm2.model_name"),
    ("server.model_aliases={teachers/tiny: bundled:smollm2}", "and so is server.model_aliases.teachers/tiny"),
    (of("tiny", "model_path", ACTOR), "which is also server.model_name, a model from bundled:smollm2"),
    (of("tiny", "key", "smollm2"), "distillation.teacher_models.tiny.key is smollm2, and so is that of smollm2"),
    (of("tiny", "model_path", "/nowhere"), "give a Hugging Face model folder in distillation.teacher_models.tiny"),
    (of("tiny", "num_replica", 2), "unknown key distillation.teacher_models.tiny.num_replica; the nearest is "
     "distillation.teacher_models.tiny.num_replicas"),
    (of("tiny", "num_replicas", -1), "num_replicas is -1; it must be at least 1"),
    (of("tiny", "num_replicas", "two"), "num_replicas is 'two'; it must be a whole number"),
    (of("tiny", "inference.max_model_length", 5), "the nearest is distillation.teacher_models.tiny.inference.max_model_len"),
    (of("tiny", "inference.max_model_len", 0), "distillation.teacher_models.tiny.inference.max_model_len is 0"),
    (of("tiny", "inference.dtype", 3), "inference.dtype is 3; it must be text"),
    (of("tiny", "inference.tensor_model_parallel_size", 2), "tensor_model_parallel_size is 2; without a GPU it must be 1"),
    (of("tiny", "inference.data_parallel_size", 0), "tiny.inference.data_parallel_size is 0; it must be at least 1"),
    (of("tiny", "inference.name", "null"), "tiny.inference.name is missing; give vllm"),
    (of("more", "num_replicas", 1), "distillation.teacher_models.more.model_path is missing"),
    (of("tiny", "inference", 3), "distillation.teacher_models.tiny.inference is 3; it must be a section of keys"),
    ("distillation.teacher_models=3", "it must be a section of keys"),
    ("distillation=3", "distillation is 3; it must be a section of keys"),
    ("distillation.nodes=1", "unknown key distillation.nodes; the nearest is distillation.nnodes"),
    ("distillation.distillation_loss.topk=3", "distillation.distillation_loss has no effect here: the client's"),
    ("distillation.teacher_key=task", "distillation.teacher_key has no effect here"),
    ("distillation.nnodes=1", "distillation.nnodes * distillation.n_gpus_per_node is 1, and the teachers take 2 GPUs"),
    ("distillation.dedicated_resource_pools=false", "is 0, and the teachers take 2 GPUs; without distillation.dedicated"),
    ("distillation.n_gpus_per_node=0", "distillation.n_gpus_per_node is 0; it must be at least 1"),
    ("cpu.teacher_kv_cache_gb=0", "cpu.teacher_kv_cache_gb is 0; it must be at least 1"),
])
def test_what_cannot_be_is_one_error_that_names_the_key(override, text):
    assert text in refusal(CPU, override)


def test_no_teacher_at_all_is_an_error(tmp_path):
    (tmp_path / "none.yaml").write_text("device: cpu\nserver: {model_name: a/b}\ndistillation: {enabled: true}\n")
    assert "distillation.teacher_models names no teacher" in refusal(tmp_path / "none.yaml")


def test_a_replica_lies_within_a_node_or_on_whole_ones(gpu):
    message = refusal(gpu, "distillation.n_gpus_per_node=3")
    assert "neither within one node nor whole nodes of distillation.n_gpus_per_node (3)" in message
    assert load(gpu, "distillation.n_gpus_per_node=4").teachers[0].replica_size == 8


def test_one_pool_for_all_teachers_must_be_filled(gpu):
    override = ("distillation.dedicated_resource_pools=false", "distillation.nnodes=3")
    assert "is 24, and the teachers take 12 GPUs" in refusal(gpu, *override)
    assert load(gpu, *override, "distillation.n_gpus_per_node=4").distillation.nnodes == 3


def test_an_engine_that_this_server_has_not_is_refused_at_the_start_only(gpu):
    config = load(gpu, of("small", "inference.name", "sglang"))
    with pytest.raises(ConfigError, match=f"{of('small', 'inference.name')} is sglang; this server samples with"):
        check_served(config)
    check_served(load(gpu))


def test_the_key_to_raise_for_more_candidates_is_at_hand(gpu):
    config = load(gpu, of("small", "inference.engine_kwargs.vllm.max_logprobs", 512))
    large, small = config.teachers
    assert (large.max_logprobs, small.max_logprobs) == (128, 512)
    assert small.preset_key("engine_kwargs.vllm.max_logprobs") == of("small", "inference.engine_kwargs.vllm.max_logprobs")


def test_verl_accepts_the_teachers_and_its_refusals_are_one_error(gpu):
    load(gpu).check_verl()
    config = load(gpu, of("small", "inference.mode", "sync"))
    with pytest.raises(ConfigError, match=f"^{gpu}: verl refuses distillation.teacher_models.small: .*sync"):
        config.check_verl()
