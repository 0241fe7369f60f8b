"""verl's own data set class reads the files."""

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_drmas.data.arithmetic import arithmetic_rows
from verl_drmas.data.math import load_prompts
from verl_drmas.data.parquet import write_rows
from verl_drmas.data.search import SEARCH_SCHEMA, question_row
from verl_drmas.rewards.qa import golds_of

rl_dataset = pytest.importorskip("verl.utils.dataset.rl_dataset", reason="verl is not installed")


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def _read(path, tokenizer, tmp_path, monkeypatch, **options):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = OmegaConf.create({"cache_dir": str(tmp_path), "filter_overlong_prompts_workers": None, **options})
    return rl_dataset.RLHFDataset(str(path), tokenizer, config)


def test_arithmetic(tokenizer, tmp_path, monkeypatch):
    rows = arithmetic_rows()[0]
    read = _read(write_rows(rows, tmp_path / "train.parquet"), tokenizer, tmp_path, monkeypatch, max_prompt_length=8)
    assert len(read) == len(rows)
    for row, item in zip(rows, read, strict=True):
        assert item["raw_prompt"] == row["prompt"]
        assert item["index"] == row["extra_info"]["index"]
        assert item["reward_model"] == row["reward_model"]
        assert item["data_source"] == "arithmetic"


def test_real_questions_and_the_length_filter(math_files, tokenizer, tmp_path, monkeypatch):
    rows = load_prompts([str(math_files / "bench" / "amc.json")], split="test").rows
    path = write_rows(rows, tmp_path / "amc.parquet")
    read = _read(path, tokenizer, tmp_path, monkeypatch, max_prompt_length=60)
    kept = [row for row in rows if len(tokenizer(row["extra_info"]["question"])["input_ids"]) <= 60]
    assert 0 < len(kept) < len(rows)
    assert [item["extra_info"] for item in read] == [row["extra_info"] for row in kept]
    batch = rl_dataset.collate_fn([read[0], read[1]])
    assert list(batch["data_source"]) == ["amc", "amc"]


def test_lists_of_golds(tokenizer, tmp_path, monkeypatch):
    golds = [["Rome", "Roma"], ["1"]]
    rows = [question_row("who", some, data_source="s", split="train", index=n) for n, some in enumerate(golds)]
    path = write_rows(rows, tmp_path / "q.parquet", schema=SEARCH_SCHEMA)
    read = _read(path, tokenizer, tmp_path, monkeypatch, max_prompt_length=8)
    batch = rl_dataset.collate_fn([read[0], read[1]])
    assert [golds_of(reward["ground_truth"]) for reward in batch["reward_model"]] == golds
    assert [reward["ground_truth"] for reward in batch["reward_model"]] == golds  # lists, as they were written
    assert [info["support_titles"] for info in batch["extra_info"]] == [[], []]
    assert list(batch["index"]) == [0, 1]
