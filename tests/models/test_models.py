"""Model names and folders, and the bundled models: the repaired tokenizer and the weights behind it."""

import json
import threading
import time

import huggingface_hub
import pytest

from verl_tinker import models
from verl_tinker.models import ModelError, ModelMap, default_cache_dir, prepare_smollm2, prepare_tiny, resolve_model

HARD_TEXTS = [
    "1234567 + 89 = 1234656",
    "你好，世界 🌍 — naïve façade, ẞ and Ünïcödé",
    "日本語 한국어 العربية עברית",
    "  leading, trailing  \n\n\tand  inner   spaces \n",
    "don't, it's, we'll: 3.14159e-10 <b>&amp;</b>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "👩‍👩‍👧 e\u0301 \u200b \x00",
    "",
]


@pytest.fixture(scope="module")
def smollm2():
    return prepare_smollm2(default_cache_dir())


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_smollm2_knows_the_capital_of_france(smollm2, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_weights_are_saved_as_they_are_described(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"], config["vocab_size"]) == ("bfloat16", True, 49152)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert "quantization_config" not in config
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (smollm2 / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_repaired_faults_of_the_tokenizer(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer("no start token")["input_ids"][0] != 1
    assert tokenizer("<|im_start|><|im_end|>")["input_ids"] == [1, 2]


def test_the_tiny_models_are_the_same_each_time_and_share_the_tokenizer(tmp_path, smollm2):
    first, again = prepare_tiny(tmp_path / "a"), prepare_tiny(tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (smollm2 / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_the_tiny_model_is_tied_or_not(tied):
    from safetensors import safe_open

    folder = prepare_tiny(default_cache_dir(), tied)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert ("lm_head.weight" in weights.keys()) is not tied
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["head_dim"], config["max_position_embeddings"]) == (tied, 32, 2048)


def test_many_who_want_a_model_make_it_once(tmp_path):
    made, found = [], []

    def build(folder):
        made.append(folder)
        time.sleep(0.2)
        (folder / "weights").write_text("whole")

    def want():
        found.append((models._once(tmp_path, "m", build) / "weights").read_text())

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found == ["whole"] * 4


def test_a_model_that_was_half_made_is_made_anew(tmp_path):
    def killed(folder):
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._once(tmp_path, "m", killed)
    assert not (tmp_path / "m").exists()
    folder = models._once(tmp_path, "m", lambda folder: (folder / "other").write_text("whole"))
    assert [f.name for f in folder.iterdir()] == ["other"]


def test_names_and_their_suffixes():
    names = ModelMap({"a/b": "one", "a/b:peft:9": "two", "c/d": "one"})
    assert (names["a/b"], names["a/b:other"], names["a/b:peft:9"], names["c/d"]) == ("one", "one", "two", "one")
    assert names.listed("a/b:other") == "a/b" and names.listed("a/b:peft:9") == "a/b:peft:9"
    assert "a/b:x" in names and "x/y" not in names and "x/y:z" not in names
    assert list(names) == ["a/b", "a/b:peft:9", "c/d"]


def test_names_of_one_place_share_one_folder(tmp_path):
    folders = ModelMap({"a/b": "bundled:tiny", "c/d": "bundled:tiny"}).folders(default_cache_dir())
    assert folders["a/b"] == folders["c/d"] == prepare_tiny(default_cache_dir())


def test_a_folder_stands_for_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_other_names_are_asked_of_the_hub(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    assert resolve_model("Qwen/Qwen3-8B") == tmp_path and asked == ["Qwen/Qwen3-8B"]


def test_a_hub_that_does_not_answer_is_a_reason(monkeypatch):
    def fail(name, **_):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="'Qwen/Qwen3-8B' is neither a folder nor to be had from the hub: no route$"):
        resolve_model("Qwen/Qwen3-8B")


@pytest.mark.parametrize("name, reason", [
    ("bundled:huge", "there are bundled:smollm2, bundled:tiny"), ("/no/such/folder", "holds no config.json"),
    ("./here", "holds no config.json"), ("~/nothing", "holds no config.json")])
def test_names_that_lead_nowhere(name, reason, tmp_path):
    with pytest.raises(ModelError, match=reason):
        resolve_model(name, tmp_path)


def test_the_package_of_the_bundled_model_may_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="install_verl.sh"):
        resolve_model("bundled:smollm2", tmp_path)
    assert not list(tmp_path.glob("smollm2*"))
