"""The layer that an adapter runs through gives what PEFT's own gives, forward and backward, with and without autocast."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from verl_tinker.core.types import LoraSpec
from verl_tinker.engine import adapters

pytestmark = pytest.mark.timeout(60)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = torch.nn.Linear(12, 7)

    def forward(self, x):
        return self.mlp(x)


def ours() -> tuple[Model, adapters.Adapter]:
    model = Model().requires_grad_(False)
    layers = adapters.install_layers(model, ["mlp"])
    adapter = adapters.Adapter.create(layers, LoraSpec(rank=4, seed=3), alpha=10.0, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(adapter.tensors["mlp"][1])
    adapter.activate(layers)
    return model, adapter


def pefts(adapter: adapters.Adapter) -> tuple[Model, list[torch.Tensor]]:
    model = Model().requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=10.0, target_modules=["mlp"]), model)
    pair = [model.mlp.lora_A["default"].weight, model.mlp.lora_B["default"].weight]
    with torch.no_grad():
        for p, value in zip(pair, adapter.tensors["mlp"]):
            p.copy_(value)
    return model, pair


@pytest.mark.parametrize("autocast, tolerance", [(False, 1e-6), (True, 3e-2)], ids=["float32", "bfloat16"])
def test_the_product_and_its_gradients_are_pefts(autocast, tolerance):
    model, adapter = ours()
    plain, pair = pefts(adapter)
    found, gradients = [], []
    for module, parameters in ((model, adapter.tensors["mlp"]), (plain, pair)):
        torch.manual_seed(1)
        x = torch.randn(2, 5, 12, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = module(x)
        output.float().square().sum().backward()
        found.append(output)
        gradients.append([x.grad, *(p.grad for p in parameters)])
    assert found[0].dtype == found[1].dtype == (torch.bfloat16 if autocast else torch.float32)
    for a, b in zip([found[0], *gradients[0]], [found[1], *gradients[1]]):
        scale = float(b.detach().float().abs().max())
        assert float((a.detach().float() - b.detach().float()).abs().max()) <= tolerance * scale


def test_without_an_active_adapter_it_is_the_base():
    model, adapter = ours()
    x = torch.randn(3, 12)
    assert not torch.equal(model(x), Model()(x))
    adapters.deactivate({"mlp": model.mlp})
    assert torch.equal(model(x), Model()(x))
