"""Builds models of about a million random weights, with tokenizers, so that verl and vLLM run fast on a CPU.

Two styles read arithmetic one character a token; the third reads any text:

* ``llama``  Llama, character tokens, a message list renders to its bare contents;
* ``qwen3``  Qwen3 of the same size whose ids mean other characters, for teams whose agents don't share a tokenizer;
* ``chatml`` Qwen3 over byte-level BPE with a ChatML template, for end-to-end runs on real questions.

Each comes in three sizes, for teams of unequal models.

``python -m recipes.cpu_arithmetic.tiny_model OUT --style chatml`` builds one from the shell.
"""

import logging
from pathlib import Path
from typing import Literal, get_args

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

logger = logging.getLogger(__name__)

Style = Literal["llama", "qwen3", "chatml"]
Size = Literal["small", "medium", "large"]

SHAPES: dict[Size, dict[str, int]] = {
    "small": {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1},
    "medium": {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2},
    "large": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2},
}

CHARACTER_VOCABULARY = 64
BYTE_VOCABULARY = 320

_CHARACTERS = "0123456789+-*/=?:#.,SVynabcdefghijklmopqrstuvwxz \n"
_BARE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The merges only shorten sequences a little, so a few sentences of the expected kind are enough to learn them from.
_MERGE_TEXT = (
    "The user asks the assistant a question and the assistant answers with a number in a box.",
    "How many apples does she have in total? Let x be the number of apples, so that x = 12 + 30.",
    "Natalia sold half of the clips in the morning and the other half in the evening; each costs 5 dollars.",
    "Solve the equation step by step, then verify the solution and approve or reject it.",
)


def character_tokenizer(style: Style) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one id a character and exactly `CHARACTER_VOCABULARY` ids, all of them decodable.

    Args:
        style: ``llama`` or ``qwen3``; they differ in their special tokens and in which id means which character.
    """
    if style == "qwen3":
        special, characters = ["<unk>", "<extra>", "<eos>", "<pad>"], _CHARACTERS[::-1]
    else:
        special, characters = ["<pad>", "<eos>", "<unk>"], _CHARACTERS
    tokens = special + list(characters)
    # Filled up, so that every id the model can sample has a token.
    tokens += [f"<unused{i}>" for i in range(CHARACTER_VOCABULARY - len(tokens))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_BARE_TEMPLATE,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `BYTE_VOCABULARY` ids that encodes any text, with a ChatML template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_MERGE_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_CHATML_TEMPLATE,
    )


def build(
    style: Style = "llama", *, size: Size = "medium", seed: int = 0, max_position_embeddings: int = 256
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns a random float32 model and its tokenizer.

    Args:
        style: see the module's docstring.
        size: ``small``, ``medium`` or ``large``: about 0.4, 0.74 and 1.6 million weights.
        seed: of the weights; the global torch generator is left as it was.
        max_position_embeddings: longest sequence in tokens, prompt and response together.

    Raises:
        ValueError: unknown style or size.
    """
    for name, value, known in (("style", style, get_args(Style)), ("size", size, get_args(Size))):
        if value not in known:
            raise ValueError(f"{name}: {value!r} is unknown; use one of {', '.join(known)}")
    tokenizer = byte_tokenizer() if style == "chatml" else character_tokenizer(style)
    return build_for(tokenizer, style=style, size=size, seed=seed, max_position_embeddings=max_position_embeddings)


def build_for(
    tokenizer: PreTrainedTokenizerFast,
    *,
    style: Style = "qwen3",
    size: Size = "medium",
    seed: int = 0,
    max_position_embeddings: int = 256,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns a random float32 model for a tokenizer, and that tokenizer with the model's length.

    Args:
        tokenizer: with padding and end-of-sequence tokens.
        style: `llama` gives a Llama, any other a Qwen3.
        size: see `build`.
        seed: see `build`.
        max_position_embeddings: see `build`.
    """
    tokenizer.model_max_length = max_position_embeddings
    shape = {
        "vocab_size": len(tokenizer),
        **SHAPES[size],
        "num_hidden_layers": 4,
        "head_dim": 32,
        "max_position_embeddings": max_position_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**shape)) if style == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model, tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> Path:
    """Writes weights (safetensors), configuration, generation configuration and tokenizer to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    logger.info("%s: %s weights, %d tokens", out, f"{model.num_parameters():,}", len(tokenizer))
    return out


def build_tiny_model(
    out: str | Path,
    *,
    style: Style = "llama",
    size: Size = "medium",
    seed: int = 0,
    max_position_embeddings: int = 256,
) -> Path:
    """Builds a random model and writes it to the folder `out`, ready for ``actor_rollout_ref.model.path``.

    Args:
        out: folder, made where absent.
        style: see the module's docstring.
        size: see `build`.
        seed: of the weights.
        max_position_embeddings: longest sequence in tokens.

    Returns:
        The folder.

    Raises:
        ValueError: unknown style or size.
    """
    model, tokenizer = build(style, size=size, seed=seed, max_position_embeddings=max_position_embeddings)
    return save(model, tokenizer, Path(out))


def _main(
    out: Path, style: str = "llama", size: str = "medium", seed: int = 0, max_position_embeddings: int = 256
) -> None:
    """Write a tiny random model and its tokenizer to the folder OUT."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    limits = {"seed": seed, "max_position_embeddings": max_position_embeddings}
    build_tiny_model(out, style=style, size=size, **limits)  # type: ignore[arg-type]


if __name__ == "__main__":
    typer.run(_main)
