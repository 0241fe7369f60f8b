"""A model's architecture, read from its configuration: exact counts, one clear line where it can't be."""

import json

import pytest
from omegaconf import OmegaConf

from recipes.cpu_arithmetic.tiny_model import build
from verl_drmas.config import ConfigError
from verl_drmas.plan.shape import count, read_shape

# Qwen/Qwen3-4B's config.json, as far as it shapes the model; its card counts 4.0 B parameters, 3.6 B without embedding.
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def policy(path, **model):
    return OmegaConf.create(
        {"actor_rollout_ref": {"model": {"path": str(path), **model}, "actor": {"strategy": "fsdp2"}}}
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return tmp_path


@pytest.mark.parametrize(("style", "norms"), [("llama", 2 * 128), ("qwen3", 2 * 128 + 4 * 32 + 2 * 32)])
def test_a_tiny_model_is_counted_as_it_is(style, norms):
    model = build(style)[0]
    before = model.config.to_dict()
    shape = count(model.config)
    assert shape.parameters == shape.trainable == model.num_parameters()
    assert shape.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.rest == shape.parameters - 4 * shape.layer
    assert shape.largest == max(p.numel() for p in model.parameters())
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.mlp, shape.vocabulary) == (4, 2, 32, 344, 64)
    assert shape.norms == norms
    assert model.config.to_dict() == before


def test_a_model_of_billions_takes_no_memory(folder):
    shape = read_shape(policy(folder))
    assert shape.parameters == 4_022_468_096
    assert shape.rest == shape.largest + 2560 == 151936 * 2560 + 2560  # the tied embedding counts once
    assert round((shape.parameters - shape.largest) / 1e9, 1) == 3.6


def test_overrides_and_lora(folder):
    assert read_shape(policy(folder, override_config={"num_hidden_layers": 2})).layers == 2
    assert read_shape(policy(folder, override_config={"model_config": {"num_hidden_layers": 3}})).layers == 3
    whole = read_shape(policy(folder))
    adapted = read_shape(policy(folder, lora_rank=8, target_modules=["q_proj"]))
    assert adapted.parameters == whole.parameters
    assert adapted.trainable == 36 * 8 * (2560 + 32 * 128)
    assert read_shape(policy(folder, lora={"rank": 8}, target_modules=["q_proj"])).trainable == adapted.trainable
    assert read_shape(policy(folder, lora_rank=8)).trainable > 5 * adapted.trainable  # all-linear


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't be read here"),
        ("{}", "can't be read here"),
        ("{not json", "can't be read here"),
        ('{"model_type": "qwen3", "hidden_size": 10, "num_attention_heads": "x"}', "can't be"),
        ('{"model_type": "vit"}', "can't be built from its config.json"),
    ],
)
def test_a_configuration_that_cant_be_read_is_one_line(tmp_path, content, says):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_shape(policy(tmp_path))
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"actor_rollout_ref.model.path is {str(tmp_path)!r}") and says in line


def test_nothing_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"nobody/no-such-model.*local Hugging Face cache"):
        read_shape(policy("nobody/no-such-model"))
