"""Encoders: prefixes, pooling, lengths, and what is refused."""

import numpy as np
import pytest

from verl_drmas.retrieval import IndexProblem
from verl_drmas.retrieval.encoder import EncoderSettings, embed, load_encoder, prefixes


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("intfloat/e5-base-v2", ("query: ", "passage: ")),
        ("intfloat/multilingual-E5-large", ("query: ", "passage: ")),
        ("/models/e5-small", ("query: ", "passage: ")),
        ("/cache/models--intfloat--e5-base-v2/snapshots/0123abc", ("query: ", "passage: ")),
        ("/e5/all-MiniLM-L6-v2", (None, None)),
        ("someone/make5-base", (None, None)),
        ("BAAI/bge-base-en-v1.5", (None, None)),
    ],
)
def test_e5_models_get_their_prefixes(model, expected):
    assert prefixes(EncoderSettings(model)) == expected


def test_prefixes_that_are_given_win():
    assert prefixes(EncoderSettings("intfloat/e5-base-v2", query_prefix="")) == ("", "passage: ")
    assert prefixes(EncoderSettings("a/b", "q ", "p ")) == ("q ", "p ")


@pytest.mark.parametrize("settings", [{"model": ""}, {"pooling": "max"}, {"max_length": 0}])
def test_wrong_settings_are_named(settings):
    with pytest.raises(IndexProblem, match=next(iter(settings)).replace("model", "encoder")):
        EncoderSettings(**{"model": "x", **settings})


def test_vectors_are_brought_to_length_one(stub_path):
    encoder = load_encoder(EncoderSettings(stub_path))
    texts = ["one two", "", "one one one"]
    vectors = embed(encoder, texts, queries=True, normalise=True)
    assert vectors.dtype == np.float32 and vectors.shape == (3, 24)
    assert np.allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1])
    assert np.linalg.norm(embed(encoder, texts, queries=False, normalise=False)[2]) == 3
    assert embed(encoder, [], queries=True, normalise=True).shape == (0, 24)


@pytest.mark.parametrize(("name", "said"), [("Short", r"shape \(1, 23\) for 1 texts"), ("Broken", "nan")])
def test_vectors_that_are_wrong_are_refused(stub_path, name, said):
    encoder = load_encoder(EncoderSettings(f"stub_encoder:{name}"))
    with pytest.raises(IndexProblem, match=said):
        embed(encoder, ["a"], queries=True, normalise=True)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module_here:Stub", "can't be imported"),
        ("stub_encoder:Missing", "can't be imported"),
        ("stub_encoder:needs", "without arguments"),
        ("stub_encoder:Nothing", "without dim, encode_queries, encode_passages"),
    ],
)
def test_an_import_path_that_gives_no_encoder_is_named(stub_path, path, said):
    with pytest.raises(IndexProblem, match=said) as problem:
        load_encoder(EncoderSettings(path))
    assert path in str(problem.value)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", "one", "two", "three", "four", "five"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny BERT with random weights, as transformers writes it: no pooling, no prompts."""
    pytest.importorskip("sentence_transformers")
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=40, **sizes)).save_pretrained(folder)
    return str(folder)


def encode(folder, texts, queries=True, **settings):
    return embed(
        load_encoder(EncoderSettings(folder, **settings), device="cpu"), texts, queries=queries, normalise=False
    )


def token_vectors(folder, text):
    from transformers import AutoModel, AutoTokenizer

    reads = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    return AutoModel.from_pretrained(folder)(**reads).last_hidden_state[0].detach().numpy()


def test_a_plain_model_is_pooled_as_asked(model_folder):
    tokens = token_vectors(model_folder, "one two three")
    texts = ["one two three", "five"]  # of different lengths: padding must not count
    for pooling, expected in (
        (None, tokens.mean(0)),
        ("mean", tokens.mean(0)),
        ("cls", tokens[0]),
        ("last", tokens[-1]),
    ):
        made = encode(model_folder, texts, pooling=pooling)
        assert made.dtype == np.float32
        assert np.allclose(made[0], expected, atol=1e-5), pooling


def test_prefixes_stand_before_the_text(model_folder):
    given = {"query_prefix": "query: ", "passage_prefix": "passage: "}
    plain = encode(model_folder, ["query: one", "passage: one", "one"])
    assert np.allclose(encode(model_folder, ["one"], **given), plain[0], atol=1e-5)
    assert np.allclose(encode(model_folder, ["one"], queries=False, **given), plain[1], atol=1e-5)
    assert not np.allclose(plain[0], plain[2], atol=1e-2)


def test_a_models_own_prompts_hold_unless_a_prefix_is_given(model_folder, tmp_path):
    from sentence_transformers import SentenceTransformer

    folder = str(tmp_path / "prompted")
    SentenceTransformer(model_folder, device="cpu", prompts={"query": "four ", "document": "five "}).save(folder)
    plain = encode(model_folder, ["four one", "five one", "one"])
    assert np.allclose(encode(folder, ["one"]), plain[0], atol=1e-5)
    assert np.allclose(encode(folder, ["one"], queries=False), plain[1], atol=1e-5)
    assert np.allclose(encode(folder, ["one"], query_prefix=""), plain[2], atol=1e-5)


def test_long_texts_are_cut_at_max_length_and_never_above_the_models(model_folder):
    cut = encode(model_folder, ["one two three four five"], max_length=4)
    assert np.allclose(cut, encode(model_folder, ["one two"]), atol=1e-5)  # [CLS] one two [SEP]
    assert np.isfinite(encode(model_folder, ["one " * 500])).all()


def test_a_model_that_is_not_there_is_named(tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    (tmp_path / "empty").mkdir()
    for pooling in (None, "cls"):
        with pytest.raises(IndexProblem, match="can't be loaded") as problem:
            load_encoder(EncoderSettings(str(tmp_path / "empty"), pooling=pooling))
        assert "\n" not in str(problem.value)
