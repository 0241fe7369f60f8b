"""`verl-drmas export CHECKPOINT --out DIR`: a checkpoint's models in Hugging Face format, by verl's model merger."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_drmas.trainer.step_folder import IncompleteError, inspect, step_of

FSDP, MEGATRON, READY = "fsdp", "megatron", "huggingface"
ADAPTER = "lora_adapter"  # verl's merger writes a LoRA adapter beside the base weights, under this name
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


class ExportError(ValueError):
    """What can't be exported; the message is one line with the reason."""


@dataclass(frozen=True)
class Source:
    """One model's folder of a checkpoint.

    Attributes:
        folder: `.../actor/<model_id>`.
        backend: Which of verl's layouts it has: `fsdp`, `megatron` (distributed shards), or `huggingface` (Megatron
            with a bridge, which saves in Hugging Face format itself).
    """

    folder: Path
    backend: str

    @property
    def config(self) -> Path:
        """Folder of the model's config.json and tokenizer."""
        return self.folder / "huggingface" if self.backend == FSDP else self.folder / "model" / "huggingface"


@dataclass(frozen=True)
class Exported:
    """One exported model.

    Attributes:
        folder: Where it lies now.
        backend: The layout it came from.
        adapter: Folder of its LoRA adapter, which is not merged into the weights; None without LoRA.
        base: False if the checkpoint held the adapter only.
    """

    folder: Path
    backend: str
    adapter: Path | None
    base: bool


def main(checkpoint: Path, out: Path, model: str | None = None, *, trust_remote_code: bool = False) -> int:
    """Export and say what was written. Returns the exit status: 0, or 1 with one line on what is wrong."""
    console = Console(soft_wrap=True)
    try:
        for exported in export(checkpoint, out, model, trust_remote_code=trust_remote_code):
            console.print(describe(exported), markup=False, highlight=False)
    except (ExportError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"refused: {error}", style="bold red", markup=False, highlight=False)
        return 1
    return 0


def describe(exported: Exported) -> str:
    """What an export is, in a line or two."""
    if not exported.base:
        return (
            f"{exported.adapter}: LoRA adapter only; the checkpoint was saved without base weights (save_lora_only). "
            "Load it onto the run's base model with peft.PeftModel.from_pretrained"
        )
    line = f"{exported.folder}: Hugging Face model and tokenizer, from {exported.backend}"
    if exported.backend == FSDP:
        line += ", in bfloat16 (verl's merger writes no other)"
    if exported.adapter:
        line += (
            f"\nattention: these are the base weights without what LoRA learned; the adapter is in {exported.adapter}: "
            "load it with peft.PeftModel.from_pretrained, merge it with merge_and_unload, or serve it with vLLM's "
            "--enable-lora"
        )
    return line


def export(checkpoint: Path, out: Path, model: str | None = None, *, trust_remote_code: bool = False) -> list[Exported]:
    """Write models in Hugging Face format with their tokenizers; all of them or, after an error, none.

    Args:
        checkpoint: A whole `global_step_N` folder: its models go to `out/<model_id>`. Or one `.../actor/<model_id>`
            folder (stock verl's `.../actor`, too): it becomes `out`.
        out: Where to write; nothing there is overwritten.
        model: Only this model of a `global_step_N` folder.
        trust_remote_code: Let transformers run code that comes with the model.

    Raises:
        ExportError: The checkpoint isn't whole or isn't one, or the output is taken.
    """
    targets = _targets(checkpoint, out, model)
    for target in targets:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ExportError(f"{target} is there already; remove it or give another --out")
    sources = {target: _look(folder) for target, folder in targets.items()}
    partial = {target: target.with_name(f".{target.name}.partial") for target in targets}
    try:
        for target, source in sources.items():
            shutil.rmtree(partial[target], ignore_errors=True)  # of an export that was killed
            partial[target].mkdir(parents=True)
            _merge(source, partial[target], trust_remote_code)
        for target in targets:
            partial[target].replace(target)
    finally:
        for folder in partial.values():
            shutil.rmtree(folder, ignore_errors=True)
    return [_exported(target, source.backend) for target, source in sources.items()]


def _targets(checkpoint: Path, out: Path, model: str | None) -> dict[Path, Path]:
    """The models' folders by where each is to go."""
    checkpoint, out = checkpoint.absolute(), out.absolute()
    if not checkpoint.is_dir():
        raise ExportError(f"{checkpoint} is no folder")
    if step_of(checkpoint) is None:
        if model is not None:
            raise ExportError(f"--model goes with a global_step_N folder; {checkpoint} is not named so")
        return {out: checkpoint}
    try:
        models = inspect(checkpoint).models
    except IncompleteError as error:
        raise ExportError(
            f"{checkpoint} is not a whole checkpoint: {error}; to export what there is of a model, "
            f"name its folder {checkpoint}/actor/<model_id>"
        ) from error
    if model is not None and model not in models:
        raise ExportError(f"{checkpoint} has no model {model!r}; its models are {', '.join(models)}")
    return {out / m: checkpoint / "actor" / m for m in ([model] if model else models)}


def _look(folder: Path) -> Source:
    """Find out what a model's folder holds, and that it is all there."""
    if (folder / "fsdp_config.json").is_file():
        source = Source(folder, FSDP)
        _check_shards(folder)
    elif _has_weights(folder / "model" / "huggingface"):
        source = Source(folder, READY)
    elif (folder / "model" / "huggingface" / "adapter").is_dir():
        raise ExportError(f"{folder} holds a Megatron LoRA adapter only, already exported: model/huggingface/adapter")
    elif any((folder / "model" / "dist_ckpt").glob("*")):
        source = Source(folder, MEGATRON)
    else:
        raise ExportError(
            f"{folder} is no model's folder: neither fsdp_config.json (FSDP) nor model/huggingface or model/dist_ckpt "
            "(Megatron) is in it; give a global_step_N or an actor/<model_id> folder"
        )
    if not (source.config / "config.json").is_file():
        raise ExportError(f"{source.config / 'config.json'} is missing, without which the weights have no shape")
    return source


def _check_shards(folder: Path) -> None:
    try:
        ranks = int(json.loads((folder / "fsdp_config.json").read_text())["world_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{folder / 'fsdp_config.json'} can't be read: {error}") from error
    shards = [f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ExportError(
            f"{folder} lacks {len(missing)} of {ranks} shards, first {missing[0]}: was the model left out of "
            "actor.checkpoint.save_contents, or does it lie on another node's disk?"
        )


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def _merge(source: Source, written: Path, trust_remote_code: bool) -> None:
    if source.backend == READY:
        shutil.copytree(source.config, written, dirs_exist_ok=True)
        return
    with _short_errors(source.folder):
        merger = _merger(source, written, trust_remote_code)
        try:
            merger.merge_and_save()
        except RuntimeError:
            # After it wrote the adapter of a checkpoint without base weights, the merger misses those.
            if not (written / ADAPTER).is_dir() or _has_weights(written):
                raise
        finally:
            merger.cleanup()


def _merger(source: Source, written: Path, trust_remote_code: bool) -> Any:
    from verl.model_merger.base_model_merger import ModelMergerConfig

    if source.backend == FSDP:
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger as Merger
    else:
        from verl.model_merger.megatron_model_merger import MegatronModelMerger as Merger
    shape = json.loads((source.config / "config.json").read_text())
    config = ModelMergerConfig(
        operation="merge",
        backend=source.backend,
        target_dir=str(written),
        local_dir=str(source.folder),
        hf_model_config_path=str(source.config),
        trust_remote_code=trust_remote_code,
        tie_word_embedding=bool(shape.get("tie_word_embeddings", False)),
    )
    return Merger(config)


@contextlib.contextmanager
def _short_errors(folder: Path) -> Iterator[None]:
    """One line for what verl's merger raises; what it prints goes to stderr after an error and is dropped otherwise."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except Exception as error:
        sys.stderr.write(said.getvalue())
        reason = " ".join(str(error).split()) or "no reason given"
        raise ExportError(f"verl's merger could not read {folder}: {type(error).__name__}: {reason}") from error


def _exported(target: Path, backend: str) -> Exported:
    adapter = target / ADAPTER
    return Exported(target, backend, adapter if adapter.is_dir() else None, _has_weights(target))
