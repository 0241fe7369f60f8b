"""The CPU as a verl platform (`verl.plugin.platform`), selected by VERL_PLATFORM=cpu and never by detection."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the parts of the `torch.cuda` interface that verl calls; memory figures are 0, the rest
    no-ops.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _device_module() -> types.ModuleType:
    module = _CpuModule("verl_drmas.cpu.device")
    nothing = ("set_device", "synchronize", "empty_cache", "ipc_collect", "set_per_process_memory_fraction")
    nothing += ("reset_peak_memory_stats", "reset_accumulated_memory_stats")
    zero = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    for name in nothing:
        setattr(module, name, lambda *args, **kwargs: None)
    for name in zero:
        setattr(module, name, lambda *args, **kwargs: 0)
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda device=None: "cpu"
    module.mem_get_info = lambda device=None: (0, 0)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    return module


_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    """Answers verl's questions about the device for a machine without an accelerator."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return _MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # a GPU machine must never land here by detection

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl calls tensor.to(<this>); an int would mean cuda:<int>

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # ray.init(num_gpus=N) makes N logical slots; verl counts no other resource

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # so verl moves weights through shared memory

    def rollout_env_vars(self) -> dict[str, str]:
        # vLLM reads the variable as an integer of GiB and crashes on an empty one.
        size = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        return {"VLLM_CPU_KVCACHE_SPACE": size} if size else {}

    def cudart(self) -> None:
        return None
