"""verl's FSDP2 engine on the CPU (`verl.workers.engine`); FSDP1 needs an accelerator."""

from __future__ import annotations

from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuFsdpEngine(FSDPEngineWithLMHead):
    """The stock engine, without the offload policy it forces on a reference model.

    `CPUOffloadPolicy(pin_memory=True)` needs an accelerator to pin for, and on a CPU there is nothing to offload.
    """

    def _build_fsdp_module(self, module: Any) -> Any:
        forward_only = self.engine_config.forward_only
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only
