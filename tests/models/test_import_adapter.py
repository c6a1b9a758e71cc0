"""Adapters that PEFT trained elsewhere, made into checkpoints: the same model, or a refusal that says why."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import plain
import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_tinker.core import disk
from verl_tinker.core.errors import UserError
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import LoraSpec, ModelSpec
from verl_tinker.import_adapter import import_adapter, main
from verl_tinker.models import default_cache_dir, prepare_tiny

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
TOKENS = np.arange(100, 140)


@pytest.fixture(scope="module")
def base():
    return prepare_tiny(default_cache_dir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def trained_elsewhere(base: Path, folder: Path, save_embedding_layers=False, **settings) -> torch.Tensor:
    """Write an adapter with random weights as PEFT does; returns the log-probabilities that it gives."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    torch.manual_seed(3)
    model = peft.get_peft_model(plain.load_model(base), peft.LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return plain.logprobs(model.eval(), TOKENS[:-1], TOKENS[1:]).detach()


@pytest.mark.parametrize(
    "settings, flags, added",
    [
        ({}, (True, False, False), 4),
        ({"use_rslora": True}, (True, False, False), 4),
        ({"target_modules": "all-linear"}, (True, True, False), 0),
        ({"target_modules": ["down_proj", "lm_head"]}, (False, True, True), 4),
    ],
)
def test_an_imported_adapter_is_the_same_model(base, store, tmp_path, settings, flags, added):
    wanted = trained_elsewhere(base, tmp_path / "peft", **settings)
    checkpoint, extra = import_adapter(tmp_path / "peft", store, "some/base", base, "one", "alice")
    lora = LoraSpec(4, None, *flags)
    assert re.fullmatch("tinker://imported-[0-9a-f]{16}:train:0/weights/one", str(checkpoint.path))
    assert (checkpoint.spec, checkpoint.owner, len(extra)) == (ModelSpec("some/base", lora), "alice", added)
    assert store.get(checkpoint.path) == checkpoint and store.run(checkpoint.path.run_id).spec == checkpoint.spec
    folder = store.folder(checkpoint.path)
    assert sorted(store.files(checkpoint)) == ["adapter_config.json", "adapter_model.safetensors"]
    ours = plain.logprobs(plain.PlainRun(base, folder).model, TOKENS[:-1], TOKENS[1:]).detach()
    assert float((ours - wanted).abs().max()) < 1e-5
    for name in extra:
        weights = load_file(folder / "adapter_model.safetensors")
        assert not weights[f"base_model.model.{name}.lora_B.weight"].any()
        assert weights[f"base_model.model.{name}.lora_A.weight"].any()


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base model"),
        ({"target_modules": ["embed_tokens"]}, "not a lora_A or lora_B weight"),
        ({"target_modules": ["lm_head"], "save_embedding_layers": True}, "lm_head.base_layer.*embedding_layers=False"),
    ],
)
def test_what_our_adapters_cannot_express_is_refused(base, store, tmp_path, settings, text):
    trained_elsewhere(base, tmp_path / "peft", **settings)
    with pytest.raises(UserError, match=text):
        import_adapter(tmp_path / "peft", store, "some/base", base, "one")
    assert store.list() == [] and store.runs() == []


def without(weights: dict, part: str) -> dict:
    return {key: value for key, value in weights.items() if part not in key}


@pytest.mark.parametrize(
    "damage, text",
    [
        (lambda w: without(w, "layers.0.self_attn.q_proj.lora_B"), "no weight model.layers.0.self_attn.q_proj.lora_B"),
        (lambda w: {k: v[:2] if "lora_A" in k else v for k, v in w.items()}, r"is \[2, 64\], but .* \[4, 64\]"),
        (lambda w: {k: v * float("nan") for k, v in w.items()}, "not finite"),
        (lambda w: {k.replace("layers.1", "layers.7"): v for k, v in w.items()}, "layers.7.*no linear layer"),
    ],
)
def test_weights_that_do_not_fit_are_refused(base, store, tmp_path, damage, text):
    trained_elsewhere(base, tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({k: v.contiguous() for k, v in damage(load_file(file)).items()}, file)
    with pytest.raises(UserError, match=text):
        import_adapter(tmp_path / "peft", store, "some/base", base, "one")
    assert store.list() == []


@pytest.mark.parametrize(
    "content",
    [b"[]", b"3", b'"LORA"', b"null", b"{", pytest.param(b"[" * 100_000, id="deep"), pytest.param(b"\xff\xfe", id="not text")])
def test_a_description_that_is_no_object_is_refused(base, store, tmp_path, content):
    file = tmp_path / "adapter_config.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} .*give a folder that PEFT's save_pretrained wrote"):
        import_adapter(tmp_path, store, "some/base", base, "one")
    with pytest.raises(SystemExit, match=f"{file} .*give a folder that PEFT's save_pretrained wrote"):
        main([str(tmp_path), "--name", "one", "--config", "configs/quick_start/cpu.yaml"])


@pytest.mark.parametrize("changed", [{"r": 0}, {"r": 4.0}, {"lora_alpha": float("nan")}, {"lora_alpha": float("inf")}, {"r": "4"}])
def test_a_scale_that_is_no_number_is_refused(base, store, tmp_path, changed):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **changed}))
    with pytest.raises(UserError, match="it must be a positive, finite number"):
        import_adapter(tmp_path, store, "some/base", base, "one")


@pytest.mark.parametrize("name", [["some/base"], 5, None])
def test_a_base_model_that_is_no_name_is_refused(tmp_path, name):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": name}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=re.escape(f"the adapter's base model is {name!r} and the preset serves ")):
        main([str(tmp_path), "--name", "one", "--config", "configs/quick_start/cpu.yaml"])


def test_an_import_that_the_disk_has_no_room_for_is_refused_before_it_begins(base, store, tmp_path, monkeypatch):
    trained_elsewhere(base, tmp_path / "peft")
    before = sorted(store.root.rglob("*"))
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match="server.checkpoint_dir has 1000 bytes free and importing tinker://imported-.* needs"):
        import_adapter(tmp_path / "peft", store, "some/base", base, "one")
    assert sorted(store.root.rglob("*")) == before


def test_a_folder_of_checkpoints_that_cannot_be(base, tmp_path):
    trained_elsewhere(base, tmp_path / "peft")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=f"server.checkpoint_dir: {tmp_path / 'file'} cannot be written to"):
        main([str(tmp_path / "peft"), "--name", "one", "--config", "configs/quick_start/cpu.yaml", "--base-model", "some/base",
              "--checkpoint-dir", str(tmp_path / "file"), "--set=server.model_path=bundled:tiny", "--set=server.model_name=some/base"])


def test_a_pickle_is_not_read(base, store, tmp_path):
    trained_elsewhere(base, tmp_path / "peft")
    (tmp_path / "peft" / "adapter_model.safetensors").rename(tmp_path / "peft" / "adapter_model.bin")
    with pytest.raises(UserError, match="save the adapter with PEFT as safetensors"):
        import_adapter(tmp_path / "peft", store, "some/base", base, "one")


def test_the_command_prints_the_path(base, tmp_path):
    trained_elsewhere(base, tmp_path / "peft")
    command = [
        sys.executable, "-m", "verl_tinker.import_adapter", str(tmp_path / "peft"), "--name", "one",
        "--checkpoint-dir", str(tmp_path / "checkpoints"), "--config", "configs/quick_start/cpu.yaml",
        "--set", "server.model_path=bundled:tiny", "--set", "server.model_name=some/base",
    ]
    config = tmp_path / "peft" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "some/base"}))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    (checkpoint,) = CheckpointStore(tmp_path / "checkpoints").list()
    assert done.stdout == f"{checkpoint.path}\n" and "Added with B zero" in done.stderr
    assert checkpoint.spec == replace(checkpoint.spec, base_model="some/base")
