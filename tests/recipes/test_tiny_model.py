"""The tiny models as others load them: through AutoTokenizer and AutoModelForCausalLM."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from recipes.cpu_arithmetic.tiny_model import build, build_tiny_model

STYLES = ("llama", "qwen3", "chatml")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4=?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns one built folder a style."""
    root = tmp_path_factory.mktemp("tiny")
    return {style: build_tiny_model(root / style, style=style, seed=3, max_position_embeddings=96) for style in STYLES}


@pytest.mark.parametrize("style", STYLES)
def test_loads_and_agrees_on_ids_and_limits(folders, style):
    tokenizer = AutoTokenizer.from_pretrained(folders[style])
    model = AutoModelForCausalLM.from_pretrained(folders[style])

    assert tokenizer.is_fast
    assert len(tokenizer) == model.config.vocab_size == len(set(tokenizer.get_vocab().values()))
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 96
    assert model.dtype == torch.float32
    generation = GenerationConfig.from_pretrained(folders[style])
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert generation.eos_token_id != generation.pad_token_id


@pytest.mark.parametrize("style", ["llama", "qwen3"])
def test_characters_are_tokens_and_the_template_adds_nothing(folders, style):
    tokenizer = AutoTokenizer.from_pretrained(folders[style])
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "V:3+4=8?"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert len(ids) == len("V:3+4=8?")
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == "V:3+4=8?"
    assert tokenizer.decode([*tokenizer("17")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "17"


def test_the_two_character_tokenizers_disagree(folders):
    llama, qwen3 = (AutoTokenizer.from_pretrained(folders[style]) for style in ("llama", "qwen3"))
    assert llama.eos_token_id != qwen3.eos_token_id
    assert llama("V:3+4=8?")["input_ids"] != qwen3("V:3+4=8?")["input_ids"]


@pytest.mark.parametrize("text", ["\\boxed{\\frac{3}{4}}", "Größe ≤ 10 €\n\n\ttab", "数学 🙂"])
def test_the_general_tokenizer_keeps_any_text(folders, text):
    tokenizer = AutoTokenizer.from_pretrained(folders["chatml"])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chatml_marks_turns_with_single_tokens(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["chatml"])
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4=?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert ids.count(tokenizer.eos_token_id) == 2


def test_size_and_seed():
    (first, _), (again, _), (other, _) = build("llama", seed=1), build("llama", seed=1), build("llama", seed=2)
    assert 0.7e6 < first.num_parameters() < 0.8e6
    weights = [model.lm_head.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("size", "millions"), [("small", 0.4), ("medium", 0.74), ("large", 1.6)])
@pytest.mark.parametrize("style", ["llama", "qwen3"])
def test_sizes(style, size, millions):
    model, _ = build(style, size=size)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.05)
    assert model.config.num_attention_heads * model.config.head_dim == model.config.hidden_size


def test_building_leaves_the_callers_random_state(folders):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    build("llama", seed=5)
    assert torch.equal(torch.rand(1), expected)


def test_an_unknown_style_or_size_is_named():
    with pytest.raises(ValueError, match=r"style: 'gpt'.*llama, qwen3, chatml"):
        build("gpt")
    with pytest.raises(ValueError, match=r"size: 'huge'.*small, medium, large"):
        build("llama", size="huge")
