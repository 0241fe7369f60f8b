"""A model's architecture in numbers, from its configuration on disk: built without memory, nothing downloaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_drmas.config import ConfigError
from verl_drmas.plan.formulas import Shape
from verl_drmas.support import get

MODEL = "actor_rollout_ref.model"


def lora_rank(policy: Any) -> int:
    """LoRA's rank as verl reads it; 0: no LoRA."""
    return int(get(policy, f"{MODEL}.lora.rank", 0) or get(policy, f"{MODEL}.lora_rank", 0))


def read_shape(policy: Any) -> Shape:
    """A model's architecture, from its config.json or the local Hugging Face cache; nothing is downloaded.

    Raises:
        ConfigError: There is none, or it isn't a causal language model's.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = str(get(policy, f"{MODEL}.hf_config_path") or get(policy, f"{MODEL}.path"))
    trust = bool(get(policy, f"{MODEL}.trust_remote_code", False))
    try:
        # A path that begins like one is a folder, whatever the cache holds.
        source = str(Path(path).expanduser()) if path.startswith(("/", ".", "~")) else path
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{MODEL}.path is {path!r}, whose config.json can't be read here ({reason}); give a folder, or a model id "
            "that is in the local Hugging Face cache"
        ) from None
    own = get(policy, f"{MODEL}.override_config", {})
    own = OmegaConf.to_container(own, resolve=True) if isinstance(own, DictConfig) else dict(own)
    for name, value in own.get("model_config", own).items():
        if hasattr(config, name) and not isinstance(value, Mapping):
            setattr(config, name, value)
    targets = get(policy, f"{MODEL}.target_modules", "all-linear")
    targets = targets if isinstance(targets, str) else list(targets)
    megatron = get(policy, "actor_rollout_ref.actor.strategy") == "megatron"  # its names of layers are its own
    try:
        return count(config, rank=lora_rank(policy), targets="all-linear" if megatron else targets, trust=trust)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"{MODEL}.path is {path!r}, whose model can't be built from its config.json: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None


def count(config: Any, *, rank: int = 0, targets: str | list[str] = "all-linear", trust: bool = False) -> Shape:
    """Count a model's parameters by building it on PyTorch's meta device, where tensors have a shape and no memory.

    Args:
        config: A Hugging Face configuration.
        rank: LoRA's; 0: all parameters are trained.
        targets: The layers that get an adapter.
        trust: Run the model's own code.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Kernels for attention need not be installed where one plans.
        own = copy.deepcopy(config)  # building writes the kernels' name into it
        model = AutoModelForCausalLM.from_config(own, attn_implementation="eager", trust_remote_code=trust)
    text = config.get_text_config()
    sizes = [p.numel() for p in model.parameters()]
    units = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    layers = [sum(p.numel() for p in m.parameters()) for m in units] or [sum(sizes) // text.num_hidden_layers]
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    norms, rows = (
        _norms(units[-1], text.hidden_size, {"q": heads, "k": kv_heads}) if units else (2 * text.hidden_size, 2)
    )
    experts = int(getattr(text, "num_experts_per_tok", 0) or 0)
    shape = {
        "parameters": sum(sizes),
        "layer": max(layers),
        "rest": max(0, sum(sizes) - sum(layers)),
        "largest": max(sizes),
        "layers": text.num_hidden_layers,
        "hidden": text.hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "mlp": _mlp(text, experts),
        "experts": experts,
        "norms": norms,
        "norm_rows": rows,
        "vocabulary": text.vocab_size,
    }
    return Shape(**shape, trainable=_adapters(model, rank, targets) if rank else sum(sizes))


def _norms(layer: Any, hidden: int, heads: dict[str, int]) -> tuple[int, int]:
    """Widths of a layer's norms together, and how many vectors of a token they normalise."""
    width = rows = 0
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and weight is not None and weight.dim() == 1:
            times = heads.get(name.rpartition(".")[2][0], 1) if weight.numel() < hidden else 1
            width, rows = width + times * weight.numel(), rows + times
    return width, rows


def _mlp(text: Any, experts: int) -> int:
    """Width of the MLP that a token passes."""
    dense = int(text.intermediate_size)
    if not experts:
        return dense
    one = int(getattr(text, "moe_intermediate_size", None) or dense)
    shared = int(getattr(text, "shared_expert_intermediate_size", 0) or 0)
    shared += one * int(getattr(text, "n_shared_experts", 0) or 0)
    return experts * one + shared


def _adapters(model: Any, rank: int, targets: str | list[str]) -> int:
    import torch
    from peft import LoraConfig, TaskType, get_peft_model

    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, target_modules=targets))
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)
