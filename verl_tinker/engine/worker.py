"""The actor worker: verl's Tinker worker with training runs of their own.

Owns the table of runs in one rank and their files. Does not order commands: the scheduler sends one at a time.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker, _apply_optim_step_params

from verl_tinker.core.errors import CapacityError, EngineError, UserError
from verl_tinker.core.types import AdamParams, LoraSpec
from verl_tinker.engine import fsdp
from verl_tinker.engine.adapters import Adapter
from verl_tinker.engine.fingerprints import write_fingerprints
from verl_tinker.engine.losses import tinker_loss
from verl_tinker.engine.run_state import OPTIMIZER_FILE, RunState, copy_into, whole


class TinkerWorker(TinkerActorRolloutRefWorker):
    """One rank of the actor. A run is selected before each command; `None` selects the base model."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        if get_device_name() == "cpu":
            from verl_tinker.engine.cpu import attention

            attention.install()
            # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
            initialize_global_process_group_ray(backend="cpu:gloo")
        fsdp.register(get_device_name())
        super().init_model()
        self.actor.set_loss_fn(functools.partial(tinker_loss, actor=omega_conf_to_dataclass(self.config.actor)))
        self.runs: dict[str, RunState] = {}

    @property
    def engine(self) -> fsdp.TinkerFSDPEngine:
        return self.actor.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        """The rank's process id; shows that the worker answers."""
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def create_run(self, run_id: str, lora: LoraSpec | None, alpha: float) -> int:
        """A fresh run, and the bytes of its parameters; full fine-tuning rebuilds the module with trainable weights."""
        self._prepare_base(full=lora is None)
        if lora is None:
            parameters = dict(self.engine.module.named_parameters())
            self.runs[run_id] = RunState(parameters, None)
        else:
            sample = next(self.engine.module.parameters())
            adapter = Adapter.create(self.engine.layers, lora, alpha, sample.dtype, sample.device)
            self.runs[run_id] = RunState(adapter.parameters(), adapter)
        return sum(p.numel() * p.element_size() for p in self.runs[run_id].parameters.values())

    def _prepare_base(self, full: bool) -> None:
        engine = self.engine
        engine.select(None, None)
        # After full fine-tuning the base is not the base any more, so it is read from disk again.
        if full or engine.trains_base:
            if self.runs:
                raise CapacityError(
                    "lora_config.rank: full fine-tuning (rank 0) has the worker group to itself, adapters share one; "
                    f"live now: {', '.join(self.runs)}. End those clients, or wait until their sessions expire "
                    "(server.session_timeout_s in the preset)")
            engine.trains_base = full
            engine.module = engine.optimizer = None
            engine.initialize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_run(self, run_id: str) -> None:
        self.engine.select(None, None)
        self.runs.pop(run_id, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def select_run(self, run_id: str | None) -> None:
        self._select(run_id)

    def _select(self, run_id: str | None) -> RunState | None:
        if run_id is None:
            self.engine.select(None, None)
            return None
        if run_id not in self.runs:
            raise EngineError(f"this worker holds no run {run_id}")
        self.engine.select(run_id, self.runs[run_id])
        return self.runs[run_id]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step_run(self, run_id: str, adam: AdamParams) -> dict[str, float]:
        """One AdamW update of the selected run; nothing changes when the gradient is not finite."""
        run = self._select(run_id)
        started = time.perf_counter()
        self.engine.optimizer_config.clip_grad = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
        with self._loaded():
            _apply_optim_step_params(run.optimizer, {
                "lr": float(adam.learning_rate),
                "betas": (float(adam.beta1), float(adam.beta2)),
                "eps": float(adam.eps),
                "weight_decay": float(adam.weight_decay),
            })
            moving = [p for p in run.parameters.values() if p.grad is not None]
            norm = self.engine.optimizer_step()
            update = run.update_norm(moving, adam)
        if not torch.isfinite(torch.tensor(norm)):
            raise EngineError(f"the gradient's norm is {norm}; the step was not applied and the gradient is cleared")
        return {"grad_norm": norm, "update_norm": update, "learning_rate": adam.learning_rate,
                "step_seconds": time.perf_counter() - started}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_weights(self, run_id: str, folder: str, base_model: str) -> None:
        """PEFT layout for an adapter, Hugging Face layout for full fine-tuning."""
        run = self._select(run_id)
        target = Path(folder)
        with self._loaded():
            if run.adapter is not None:
                if self.rank == 0:
                    run.adapter.save(target, base_model)
                return
            named = {name: whole(p) for name, p in run.parameters.items()}
        if self.rank == 0:
            write_fingerprints(target, named)
            save_file(named, target / "model.safetensors", metadata={"format": "pt"})
            config = copy.deepcopy(self.engine.model_config.hf_config)
            # verl notes the preset's override there; a name of ours would keep every other program from loading it.
            config.__dict__.pop("attn_implementation", None)
            config.save_pretrained(target)
            self.engine.model_config.tokenizer.save_pretrained(target)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_optimizer(self, run_id: str, folder: str) -> None:
        run = self._select(run_id)
        with self._loaded():
            run.save_optimizer(Path(folder), writes=self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def park_run(self, run_id: str, folder: str, base_model: str) -> None:
        """All of an adapter run; `load_run` takes the gradient too when it finds one."""
        run, target = self._select(run_id), Path(folder)
        with self._loaded():
            run.save_optimizer(target, writes=self.rank == 0)
            if self.rank == 0:
                run.adapter.save(target, base_model)
                run.save_gradient(target)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_run(self, run_id: str, folder: str, optimizer: bool) -> None:
        """Weights and, if asked, optimizer state of a saved folder; the gradient becomes a parked run's, or none."""
        run = self._select(run_id)
        if optimizer and not (Path(folder) / OPTIMIZER_FILE).exists():
            raise UserError("path: the checkpoint has no optimizer state; load it without the optimizer, by "
                            "create_training_client_from_state or load_state")
        # Read before anything is changed, for a damaged file must not leave half of a checkpoint in the run.
        moments = load_file(Path(folder) / OPTIMIZER_FILE) if optimizer else None
        with self._loaded():
            self._load_weights(run, Path(folder))
            run.reset_optimizer()
            # The engine offloads the optimizer that it has, so it must have the new one.
            self._select(run_id)
            if moments is not None:
                run.load_optimizer(moments)
                run.load_gradient(Path(folder))

    def _loaded(self):
        """verl's context in which an offloaded run is on the device; outside it host copies may still be under way."""
        return self.engine.train_mode(zero_grad_on_exit=False)

    def _load_weights(self, run: RunState, source: Path) -> None:
        if run.adapter is None:
            self._load_full(run, source)
            return
        if not (source / "adapter_model.safetensors").exists():
            raise UserError("path: the checkpoint holds full weights, this run trains an adapter; "
                            "create the run with rank 0 or load an adapter checkpoint")
        run.adapter.load(source)

    def _load_full(self, run: RunState, source: Path) -> None:
        file = source / "model.safetensors"
        if not file.exists():
            raise UserError("path: the checkpoint holds an adapter, this run trains all weights; "
                            "create the run with the adapter's LoRA rank")
        with safe_open(file, framework="pt") as saved:
            odd = sorted(set(saved.keys()) ^ set(run.parameters))
            if odd:
                raise UserError(f"path: the checkpoint is of another base model (it differs in {odd[0]})")
            for name, p in run.parameters.items():
                copy_into(p, saved.get_tensor(name))
