"""Checkpoints in verl's layouts, written without Ray, come out as Hugging Face models that load and generate."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from verl_drmas.cli import app
from verl_drmas.export import ExportError, describe, export
from verl_drmas.trainer.step_folder import complete


def tiny_model(seed: int, **config) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config |= {"architectures": ["LlamaForCausalLM"], "pad_token_id": 0, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, **config))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<p>", "<e>", "<u>", *"0123456789+=?"])}, "<u>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<p>", eos_token="<e>", unk_token="<u>", chat_template="{{ messages }}"
    )


def save_fsdp(folder: Path, model, ranks: int = 1) -> Path:
    """What verl's FSDP checkpoint manager leaves of a model: a shard a rank, config and tokenizer."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        torch.save(model.state_dict(), folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    model.config.save_pretrained(folder / "huggingface")
    tiny_tokenizer().save_pretrained(folder / "huggingface")
    return folder


@pytest.fixture
def step(tmp_path):
    """A whole checkpoint of the models `a` (one rank) and `b` (tied embeddings, two ranks), and the models."""
    trained = {"a": tiny_model(0), "b": tiny_model(1, tie_word_embeddings=True)}
    folder = tmp_path / "run" / "global_step_7"
    for ranks, (model_id, model) in enumerate(trained.items(), start=1):
        save_fsdp(folder / "actor" / model_id, model, ranks)
    complete(folder, list(trained))
    return folder, trained


def assert_same(exported: Path, trained) -> None:
    """Bit-identical weights but for verl's rounding to bfloat16, a tokenizer, and a model that generates."""
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = trained.state_dict()
    assert set(model.state_dict()) == set(expected)
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name].bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template == "{{ messages }}"
    prompt = tokenizer("12+3=", return_tensors="pt")
    assert prompt.input_ids.tolist() == tiny_tokenizer()("12+3=", return_tensors="pt").input_ids.tolist()
    answer = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape == (1, 9)
    with torch.no_grad():
        assert torch.equal(model(**prompt).logits, trained.bfloat16()(**prompt).logits)


def test_every_model_of_a_step_is_exported(step, tmp_path):
    folder, trained = step
    done = export(folder, tmp_path / "out")
    assert [exported.folder.name for exported in done] == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "b"]
    for model_id, model in trained.items():
        assert_same(tmp_path / "out" / model_id, model)
    assert "bfloat16" in describe(done[0])


def test_one_models_folder_becomes_the_output_itself(step, tmp_path):
    folder, trained = step
    (folder / "complete.json").unlink()  # one model's folder can be exported from a step that isn't whole
    export(folder / "actor" / "b", tmp_path / "out" / "deep")
    assert_same(tmp_path / "out" / "deep", trained["b"])
    assert os.listdir(tmp_path / "out") == ["deep"]


def test_the_command_says_what_it_wrote(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", str(step[0]), "--out", "out", "--model", "b"])
    assert done.exit_code == 0, done.output
    assert "out/b: Hugging Face model and tokenizer, from fsdp, in bfloat16" in done.output
    assert "Saving model" not in done.output  # the merger's own words
    assert os.listdir("out") == ["b"]


def test_a_megatron_checkpoint_saved_through_a_bridge_is_copied(tmp_path):
    model = tiny_model(2).bfloat16()
    ready = tmp_path / "actor" / "model" / "huggingface"
    model.save_pretrained(ready)
    tiny_tokenizer().save_pretrained(ready)
    (tmp_path / "actor" / "optimizer").mkdir()
    (done,) = export(tmp_path / "actor", tmp_path / "out")
    assert done.backend == "huggingface"
    assert not (tmp_path / "out" / "optimizer").exists()
    assert_same(tmp_path / "out", model)


# -- LoRA


def lora(folder: Path, only: bool = False):
    model = get_peft_model(
        tiny_model(3), LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.load_state_dict({k: v.bfloat16() for k, v in model.state_dict().items()})  # so that nothing is rounded later
    save_fsdp(folder, model)
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}))
    if only:
        shard = folder / "model_world_size_1_rank_0.pt"
        torch.save({k: v for k, v in torch.load(shard).items() if "lora_" in k}, shard)
    return model


def test_a_lora_adapter_lies_beside_the_base_weights_and_that_is_said(tmp_path):
    trained = lora(tmp_path / "actor")
    (done,) = export(tmp_path / "actor", tmp_path / "out")
    assert done.adapter == tmp_path / "out" / "lora_adapter"
    assert "attention: these are the base weights without what LoRA learned" in describe(done)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected, untrained = trained(input_ids=prompt).logits, base(input_ids=prompt).logits
        assert (expected - untrained).abs().max() > 1e-3
        served = PeftModel.from_pretrained(base, done.adapter)(input_ids=prompt).logits
    assert torch.equal(expected, served)


def test_a_checkpoint_of_the_adapter_only_gives_the_adapter_only(tmp_path):
    lora(tmp_path / "actor", only=True)
    (done,) = export(tmp_path / "actor", tmp_path / "out")
    assert not done.base
    assert "LoRA adapter only" in describe(done)
    assert (tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "out").glob("model*"))


# -- what can't be exported: one line, and nothing is left


def break_shard(folder):
    (folder / "actor" / "b" / "model_world_size_2_rank_0.pt").write_bytes(b"no tensors")
    complete(folder, ["a", "b"])


def without(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "checkpoint", "model", "message"),
    [
        (without("complete.json"), "", None, r"not a whole checkpoint: it has no complete\.json.*actor/<model_id>"),
        (
            without("actor/b/model_world_size_2_rank_1.pt"),
            "",
            None,
            r"not a whole checkpoint: actor/b/model_world_size_2_rank_1\.pt is missing",
        ),
        (
            without("actor/b/model_world_size_2_rank_0.pt"),
            "actor/b",
            None,
            r"lacks 1 of 2 shards, first model_world_size_2_rank_0\.pt",
        ),
        (without("actor/a/huggingface/config.json"), "actor/a", None, r"huggingface/config\.json is missing"),
        (lambda f: (f / "actor/a/fsdp_config.json").write_text("{}"), "actor/a", None, r"can't be read: 'world_size'"),
        (break_shard, "", None, r"verl's merger could not read .*actor/b: "),
        (lambda f: None, "", "c", r"has no model 'c'; its models are a, b"),
        (lambda f: None, "actor/a", "a", r"--model goes with a global_step_N folder"),
        (lambda f: None, "actor", None, r"is no model's folder: neither fsdp_config\.json"),
        (lambda f: None, "nowhere", None, r"nowhere is no folder"),
        (lambda f: (f / "actor/c/model/huggingface/adapter").mkdir(parents=True), "actor/c", None, r"adapter only"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(step, tmp_path, damage, checkpoint, model, message):
    damage(step[0])
    with pytest.raises(ExportError, match=message) as error:
        export(step[0] / checkpoint, tmp_path / "out" / "export", model)
    assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name != "export"]


def test_nothing_is_overwritten(step, tmp_path):
    (tmp_path / "out" / "b").mkdir(parents=True)
    (tmp_path / "out" / "b" / "mine.txt").write_text("kept")
    with pytest.raises(ExportError, match=r"out/b is there already; remove it or give another --out"):
        export(step[0], tmp_path / "out")
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")) == ["b", "b/mine.txt"]


def test_the_command_refuses_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["export", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [f"refused: {tmp_path / 'nowhere'} is no folder"]


def test_the_remains_of_a_killed_export_are_no_hindrance(step, tmp_path):
    remains = tmp_path / ".out.partial"
    shutil.copytree(step[0] / "actor" / "b", remains)
    export(step[0] / "actor" / "a", tmp_path / "out")
    assert not remains.exists()
    assert not list((tmp_path / "out").glob("*.pt"))
