"""What the engine saves, read by the libraries that others use; what others trained, read by the engine."""

from __future__ import annotations

import numerics
import numpy as np
import peft
import plain
import pytest
import torch

from verl_tinker.core.errors import UserError
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import Datum
from verl_tinker.import_adapter import import_adapter

pytestmark = pytest.mark.timeout(400)

TOKENS = np.arange(100, 140).astype(np.int32)


def logprobs_of_run(live, name: str) -> np.ndarray:
    datum = Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:].astype(np.int64), "weights": np.ones(39, np.float32)})
    return live.do(live.engine.forward_backward(name, [datum], "cross_entropy", {}, False)).logprobs[0]


def logprobs_of_model(model: torch.nn.Module) -> np.ndarray:
    return plain.logprobs(model.eval(), TOKENS[:-1], TOKENS[1:]).detach().numpy()


def train(live, name: str, lora: bool) -> int:
    """A run after two steps, and the bytes of its parameters as the engine tells them."""
    info = live.do(live.engine.create_model(name, numerics.spec(live.engine, lora)))
    for seed in (1, 2):
        data = numerics.batch(live.settings.models[0].vocab_size, seed=seed)
        live.do(live.engine.forward_backward(name, data, "cross_entropy", {}, True))
        live.do(live.engine.optim_step(name, numerics.ADAM))
    return info.parameter_bytes


def saved_bytes(folder) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_a_saved_adapter_is_the_same_model_in_peft(live, run_name, tmp_path):
    parameter_bytes = train(live, run_name, lora=True)
    wanted = logprobs_of_run(live, run_name)
    for folder, save, copies in (
        (tmp_path / "state", live.engine.save_state, 3),
        (tmp_path / "export", live.engine.export_weights, 1),
    ):
        folder.mkdir()
        live.do(save(run_name, folder))
        base = plain.load_model(live.settings.model_folder)
        before = logprobs_of_model(base)
        loaded = peft.PeftModel.from_pretrained(base, folder)
        np.testing.assert_allclose(logprobs_of_model(loaded), wanted, atol=1e-4)
        assert np.abs(before - wanted).max() > 1e-2
        assert saved_bytes(folder) == pytest.approx(copies * parameter_bytes, rel=0.05)


def test_a_saved_full_model_is_the_same_model_in_transformers(live, run_name, tmp_path):
    parameter_bytes = train(live, run_name, lora=False)
    wanted = logprobs_of_run(live, run_name)
    live.do(live.engine.export_weights(run_name, tmp_path))
    np.testing.assert_allclose(logprobs_of_model(plain.load_model(tmp_path)), wanted, atol=1e-4)
    assert np.abs(logprobs_of_model(plain.load_model(live.settings.model_folder)) - wanted).max() > 1e-2
    assert saved_bytes(tmp_path) == pytest.approx(parameter_bytes, rel=0.05)


def test_an_imported_adapter_trains_on_as_the_model_it_was(live, run_name, tmp_path):
    """Its lora_alpha differs from the server's, and its modules are fewer than those we train together."""
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    elsewhere = peft.get_peft_model(plain.load_model(live.settings.model_folder), settings)
    for name, parameter in elsewhere.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    elsewhere.save_pretrained(tmp_path / "peft")
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint, _ = import_adapter(tmp_path / "peft", store, live.name, live.settings.model_folder, "one")
    folder = store.folder(checkpoint.path)

    live.do(live.engine.create_model(run_name, checkpoint.spec))
    fresh = logprobs_of_run(live, run_name)
    with pytest.raises(UserError, match="no optimizer state; load it without the optimizer"):
        live.do(live.engine.load_state(run_name, folder, True))
    np.testing.assert_array_equal(logprobs_of_run(live, run_name), fresh)
    live.do(live.engine.load_state(run_name, folder, False))
    np.testing.assert_allclose(logprobs_of_run(live, run_name), logprobs_of_model(elsewhere), atol=1e-4)

    exported = tmp_path / "exported"
    exported.mkdir()
    live.do(live.engine.export_sampler(run_name, exported))
    live.do(live.engine.load_version(9101, live.name, exported))
    live.do(live.engine.retire_version(9101))
    again = peft.PeftModel.from_pretrained(plain.load_model(live.settings.model_folder), exported)
    np.testing.assert_allclose(logprobs_of_model(again), logprobs_of_model(elsewhere), atol=1e-4)
