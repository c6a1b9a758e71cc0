"""`plan`: its counts against real models, its roles, and what it says of presets that do not fit."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_tinker.config import load_config
from verl_tinker.core.types import LoraSpec
from verl_tinker.models import default_cache_dir, resolve_model
from verl_tinker.plan import size as size_module
from verl_tinker.plan.__main__ import main
from verl_tinker.plan.memory import GIB, Serving, Training, cache_bytes_per_token, serving, serving_weights, training
from verl_tinker.plan.report import Cluster, report, text
from verl_tinker.plan.roles import how_it_trains, roles
from verl_tinker.plan.size import described, model_size
from verl_tinker.schema import ConfigError

pytestmark = pytest.mark.timeout(180)
ROLLOUT, ACTOR = "configs/quick_start/actor_rollout.yaml", "configs/quick_start/actor.yaml"
SINGLE, MULTI, CPU = (f"configs/distill/{name}.yaml" for name in ("single_teacher", "multi_teacher", "cpu"))
# As their pages on the hub give them.
PUBLISHED = {
    "Qwen/Qwen3-1.7B": 1_720_574_976, "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264, "Qwen/Qwen3-30B-A3B": 30_532_122_624, "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "openai/gpt-oss-20b": 20_914_757_184, "lmsys/gpt-oss-20b-bf16": 20_914_757_184, "openai/gpt-oss-120b": 116_829_156_672,
}


def load(path, *overrides):
    return load_config(path, overrides, {})


def public(name):
    return model_size(described(name, {}, default_cache_dir()))


def problems(path, *overrides, **cluster):
    return report(load(path, *overrides), Cluster(**cluster)).problems


# Counts

@pytest.mark.parametrize("name", ["bundled:tiny", "bundled:tiny-tied", "bundled:smollm2"])
def test_the_count_is_that_of_the_weights_on_the_disk(name):
    folder = resolve_model(name)
    with safe_open(folder / "model.safetensors", "pt") as saved:
        assert model_size(folder).parameters == sum(math.prod(saved.get_slice(key).get_shape()) for key in saved.keys())


def small(cls, **more):
    return cls(vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, head_dim=32, max_position_embeddings=512, **more)


@pytest.mark.parametrize("config, cls", [
    (small(Qwen3Config, tie_word_embeddings=True), Qwen3ForCausalLM),
    (small(Qwen3Config, tie_word_embeddings=False), Qwen3ForCausalLM),
    (small(Qwen3MoeConfig, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48), Qwen3MoeForCausalLM)])
def test_the_count_is_that_of_a_real_model(config, cls, tmp_path):
    config.save_pretrained(tmp_path)
    model, size = cls(config), model_size(tmp_path)
    assert size.parameters == model.num_parameters()
    experts = 0 if cls is Qwen3ForCausalLM else 3 * 8 * 3 * 64 * 48
    assert size.experts == experts
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    head, norm = 1000 * 64, 64
    assert size.gathered == head + norm + layer + (layer if config.tie_word_embeddings else max(layer, head))
    assert size.active_width == (96 if cls is Qwen3ForCausalLM else 2 * 48)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_descriptions_of_public_models_have_their_published_counts(name):
    assert public(name).parameters == PUBLISHED[name]


def test_every_description_is_held_against_a_published_count():
    folder = size_module.Path(__file__).parents[2] / "configs" / "models"
    assert {str(file.parent.relative_to(folder)) for file in folder.rglob("config.json")} == set(PUBLISHED)


def test_an_adapter_has_the_parameters_that_the_engine_gives_it():
    from verl_tinker.engine.adapters import Adapter, install_layers, linear_names

    folder = resolve_model("bundled:tiny")
    model = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        module = LlamaForCausalLM(model)
    layers = install_layers(module, linear_names(module, False))
    adapter = Adapter.create(layers, LoraSpec(rank=8, seed=0, train_attn=True, train_mlp=True, train_unembed=True), 32.0,
                             torch.float32, "cpu")
    assert model_size(folder).adapter_parameters(8) == sum(p.numel() for p in adapter.parameters().values())


# Formulas

def test_states_are_those_of_a_real_step():
    """Weights, one gradient and AdamW's moments of the tiny model, in float32 on one GPU."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model("bundled:tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
    optimizer.step()
    moments = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    parts = training(model_size(folder), Training(1, 8, 4, 4, True), None, 1)
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["gradients"] == 2 * sum(p.grad.nbytes for p in model.parameters())
    assert parts["optimizer"] == moments


def test_a_tokens_cache_is_that_of_a_real_forward_pass():
    from transformers import AutoModelForCausalLM

    folder = resolve_model("bundled:tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = model(torch.arange(8).view(1, 8), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes_per_token(model_size(folder), Serving(1, 1, 4, 0.5, 64, 64)) * 8 == held


def test_shares_of_a_mixture_of_experts():
    size = public("Qwen/Qwen3-235B-A22B")
    whole = serving_weights(size, Serving(1, 1, 2, 0.9, 1, 1))
    assert whole == 2 * size.parameters  # all experts count
    for expert_parallel in (8, 1):
        assert serving_weights(size, Serving(8, expert_parallel, 2, 0.9, 1, 1)) == whole / 8
    # Four key-value heads lie twice on eight GPUs.
    four, eight = (cache_bytes_per_token(size, Serving(n, 1, 2, 0.9, 1, 1)) for n in (4, 8))
    assert four == eight == 94 * 2 * 128 * 2
    assert public("openai/gpt-oss-120b").served_bytes(2)[1] < public("lmsys/gpt-oss-20b-bf16").served_bytes(2)[1] * 2


def test_the_share_of_a_gpu_is_used_up_and_scores_come_on_top():
    size, how = public("Qwen/Qwen3-8B"), Serving(2, 1, 2, 0.6, 8192, 32768)
    parts = serving(size, how, 80 * GIB)
    assert sum(parts.values()) - parts["scores"] == pytest.approx(0.6 * 80 * GIB)
    assert parts["scores"] == 8192 * 151936 * 7


def test_megatron_cuts_layers_and_experts_by_different_numbers():
    config = load("configs/advance/megatron_sglang_moe.yaml")
    how = how_it_trains(config)
    assert (how.model_shards, how.expert_shards, how.shards, how.tensor_parallel) == (2, 8, 16, 2)
    size = public("Qwen/Qwen3-30B-A3B")
    local = (size.parameters - size.experts) / 2 + size.experts / 8
    parts = training(size, how, None, 1)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (2 * local, 4 * local, 12 * size.parameters / 16)


def test_how_a_preset_trains():
    how = how_it_trains(load(ROLLOUT))
    assert (how.shards, how.master, how.compute, how.checkpointing, how.gathered_whole) == (8, 4, 2, True, False)
    how = how_it_trains(load(CPU))
    assert (how.shards, how.master, how.compute, how.checkpointing, how.gathered_whole) == (1, 4, 4, False, True)
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    assert how_it_trains(load(ROLLOUT, f"{fsdp}.fsdp_size=4", f"{fsdp}.model_dtype=bf16")).shards == 4
    assert how_it_trains(load(ROLLOUT, f"{fsdp}.model_dtype=bf16")).master == 2
    assert how_it_trains(load("configs/advance/veomni_moe.yaml")).master == 4


# Roles

def test_the_roles_of_the_distillation_presets():
    assert [(r.name, r.size) for r in roles(load(SINGLE))] == [("trainer and sampler", 4), ("teacher qwen3_30b", 4)]
    assert [(r.name, r.size) for r in roles(load(MULTI))] == [
        ("trainer and sampler", 4), ("teacher qwen3_235b", 8), ("teacher qwen3_32b", 4)]
    assert [(r.name, r.size) for r in roles(load(CPU))] == [
        ("trainer", 1), ("sampler", 1), ("teacher smollm2", 1), ("teacher tiny", 1)]
    assert [(r.name, r.replicas, r.replica_size) for r in roles(load("configs/advance/separate_rollout.yaml"))] == [
        ("trainer", 1, 4), ("sampler", 2, 2)]
    assert [r.name for r in roles(load(ACTOR))] == ["trainer"]


def test_teachers_are_packed_when_asked():
    assert not any(role.strict_pack for role in roles(load(MULTI)))
    assert [role.strict_pack for role in roles(load(MULTI, "distillation.strict_pack=true"))] == [False, True, True]


def test_the_two_teachers_lie_on_two_nodes():
    found = report(load(MULTI), Cluster())
    assert found.cluster.nodes == 2 and not found.problems
    assert found.placement.nodes("teacher qwen3_32b") == found.placement.nodes("trainer and sampler")


# What does not fit

@pytest.mark.parametrize("path, overrides, cluster, words", [
    (MULTI, [], {"nodes": 1}, "are 16 GPUs, and 1 node of 8 have 8; lower distillation.teacher_models.qwen3_235b."),
    (MULTI, [], {"gpus_per_node": 4}, "teacher qwen3_235b takes 8 GPUs of one node, and the largest node has 4; lower "),
    (ROLLOUT, ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor.mode=full"], {},
     "raise trainer.n_gpus_per_node or raise trainer.nnodes"),
    (ROLLOUT, ["server.max_training_runs=64", "actor.mode=lora"], {}, "lower server.max_training_runs"),
    (ROLLOUT, ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=131072", "actor.mode=lora"], {},
     "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    (ROLLOUT, ["actor_rollout_ref.rollout.max_num_batched_tokens=32768", "actor.mode=lora"], {},
     "lower actor_rollout_ref.rollout.max_num_batched_tokens"),
    (ROLLOUT, ["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"], {}, "raise actor_rollout_ref.rollout.gpu_memory"),
    (ROLLOUT, ["actor_rollout_ref.rollout.gpu_memory_utilization=0.16"], {}, "less than one sequence of 32,768; lower "
     "actor_rollout_ref.rollout.max_model_len"),
    (ROLLOUT, ["server.enable_offload=false", "actor.mode=lora"], {}, "set server.enable_offload=true"),
    (SINGLE, ["distillation.teacher_models.qwen3_30b.inference.max_num_batched_tokens=16384"], {},
     "lower distillation.teacher_models.qwen3_30b.inference.max_num_batched_tokens"),
    (SINGLE, ["distillation.teacher_models.qwen3_30b.inference.tensor_model_parallel_size=1"], {"gpu_gib": 40},
     "raise distillation.teacher_models.qwen3_30b.inference.tensor_model_parallel_size"),
    ("configs/advance/separate_rollout.yaml", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.95"], {},
     "lower actor_rollout_ref.rollout.max_num_batched_tokens or lower actor_rollout_ref.rollout.gpu_memory_utilization"),
])
def test_what_does_not_fit_names_the_key_to_change(path, overrides, cluster, words):
    found = problems(path, *overrides, **cluster)
    assert any(words in problem for problem in found), found


def test_one_way_of_training_that_fits_is_enough():
    found = report(load(ROLLOUT, "server.max_training_runs=64"), Cluster())
    assert not found.problems
    notes = [note for part in found.parts for note in part.notes if "the other way of training does" in note]
    assert notes and all("set actor.mode=full" in note for note in notes)
    assert problems(ROLLOUT, "server.max_training_runs=64", gpu_gib=40.0)


def test_more_gpus_take_less_each_and_more_tokens_take_more():
    def total(*overrides):
        return report(load(ACTOR, "actor.mode=full", *overrides), Cluster()).parts[0].total

    assert total("trainer.nnodes=2") < total() < total("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536")


# The command

def test_the_command_prints_the_plan_and_ends_well(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--config", MULTI])
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert printed.startswith(f"{MULTI}: 16 of 2 x 8 GPUs of 80 GiB\n")
    assert "teacher qwen3_235b     8 GPUs  node 0: 0-7" in printed and "sequences of 16,384" in printed


def test_json_holds_the_same(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--config", MULTI, "--json", "--gpu-memory-gb", "24"])
    tree = json.loads(capsys.readouterr().out)
    assert end.value.code == 1 and not tree["fits"] and tree["problems"]
    assert tree["roles"]["teacher qwen3_32b"]["gpus"] == 4 and len(tree["roles"]["teacher qwen3_32b"]["placement"][0]) == 4
    assert {part["role"] for part in tree["memory"]} == {"trainer", "sampler", "teacher qwen3_235b", "teacher qwen3_32b"}


def test_without_a_gpu_it_counts_processes():
    found = report(load(CPU), Cluster())
    printed = text(found)
    assert found.placement is None and not found.problems
    assert "teacher smollm2    1 process\n" in printed and "GiB of each process" in printed


def test_a_model_that_nobody_describes_is_one_error(monkeypatch, capsys, tmp_path):
    def unreachable(*_):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match=r"org/none is not .* from the hub \(no route\); .* --model-config org/none=FOLDER"):
        report(load(ACTOR, "server.model_name=org/none"), Cluster())
    small(Qwen3Config).save_pretrained(tmp_path)
    for argument in (str(tmp_path), f"org/none={tmp_path}"):
        with pytest.raises(SystemExit) as end:
            main(["--config", ACTOR, "--set", "server.model_name=org/none", "--model-config", argument])
        assert end.value.code == 0
    with pytest.raises(SystemExit) as end:
        main(["--config", ACTOR, "--model-config", "/nowhere"])
    assert end.value.code == "--model-config /nowhere: there is no /nowhere/config.json"


def test_a_description_that_transformers_does_not_know_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    with pytest.raises(ConfigError, match="transformers cannot read .*; give the folder of a causal language model"):
        model_size(tmp_path)
