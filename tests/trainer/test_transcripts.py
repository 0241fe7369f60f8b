"""Dumps hold every row in its own model's letters, beside who spoke; verl would decode all with the run's tokenizer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.dumps import read_step
from verl_drmas.rollout.rows import Row
from verl_drmas.trace.choose import choose
from verl_drmas.trace.view import view_of
from verl_drmas.trainer import transcripts as transcripts_module
from verl_drmas.trainer.transcripts import Transcripts, final_keys
from verl_drmas.trainer.written import WrittenTrainer


class Tokenizer:
    """Letters for ids; 0 is a special token."""

    eos_token_id = pad_token_id = 0

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is True
        return "".join(chr(96 + int(i)) for i in ids if i)


class Capitals(Tokenizer):
    """Another family's."""

    def decode(self, ids, skip_special_tokens):
        return super().decode(ids, skip_special_tokens).upper()


TOKENIZERS = {"small": Tokenizer(), "large": Capitals()}


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)


class Store:
    """TransferQueue's key-value calls over a dict of rows: (prompt ids, response ids, extra fields)."""

    def __init__(self, rows, masks=None):
        self.rows, self.masks, self.rewards, self.asked = rows, masks or {}, {}, []

    def kv_batch_get(self, keys, partition_id, select_fields):
        self.asked.append((list(keys), partition_id))
        prompts, responses, extra = zip(*(self.rows[key] for key in keys), strict=True)
        known = {
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(
                [self.masks.get(key, [1] * len(ids)) for key, ids in zip(keys, responses, strict=True)]
            ),
            "extra_fields": NonTensorStack(*extra),
            "index": NonTensorStack(*range(len(keys))),
            "uid": NonTensorStack(*(key.rsplit("_", 2)[0] for key in keys)),
            "rm_scores": torch.tensor([[self.rewards.get(key, 1.0)] for key in keys]),
            "num_turns": torch.ones(len(keys)),
        }
        return TensorDict({name: known[name] for name in select_fields if name in known}, batch_size=len(keys))

    def kv_batch_put(self, **kwargs):
        """Prompts are only announced."""

    def kv_clear(self, **kwargs):
        """Nothing is kept."""


ROWS = {
    "u_0_0": ([1, 2], [3, 4, 0], {"agent_id": "solver", "model_id": "small"}),
    "u_0_1": ([5], [6], {"agent_id": "verifier", "model_id": "large"}),
    "u_1_0": ([7, 8, 9], [1], {"agent_id": "solver", "model_id": "large"}),
    "stock_0_0": ([2], [2, 2], {}),
}


@pytest.fixture
def store(monkeypatch):
    made = Store(dict(ROWS))
    monkeypatch.setattr(transcripts_module, "tq", made)
    return made


def batch(keys, padding=(), partition="train"):
    tags = [{"is_padding": True} if key in padding else {} for key in keys]
    return KVBatchMeta(keys=list(keys), tags=tags, partition_id=partition)


# -- rows by key -------------------------------------------------------------------------------------------------------


def test_each_row_reads_in_its_own_models_letters(store):
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(ROWS))
    keys = ["u_1_0", "u_0_0", "u_0_1", "stock_0_0"]  # verl writes in another order
    inputs, outputs = ["?"] * 4, ["!"] * 4
    speakers = transcripts.rewrite(keys, inputs, outputs)
    assert speakers.pop("index") == [list(ROWS).index(key) for key in keys] and speakers.pop("acc") == [None] * 4
    assert inputs == ["GHI", "ab", "E", "b"]
    assert outputs == ["A", "cd", "F", "bb"]
    assert speakers == {
        "agent_id": ["solver", "solver", "verifier", "default"],
        "model_id": ["large", "small", "large", "small"],  # a stock loop's rows are the first model's
    }


def test_padding_rows_are_left_out(store):
    """Their text means nothing, and their extra fields are another row's."""
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch([*ROWS, "pad_0_0"], padding=["pad_0_0"], partition="val"))
    assert store.asked == [(list(ROWS), "val")]
    inputs, outputs = ["as", "verl"], ["wrote", "it"]
    assert transcripts.rewrite(["pad_0_0", "u_0_0"], inputs, outputs)["agent_id"] == [None, "solver"]
    assert (inputs, outputs) == (["as", "ab"], ["wrote", "cd"])


def test_keys_that_nobody_noted_are_left_alone(store):
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(["u_0_0"]))
    inputs, outputs = ["verl's", "x"], ["own", "y"]
    speakers = transcripts.rewrite(["v_0_0", "u_0_0"], inputs, outputs)
    assert (inputs, outputs) == (["verl's", "ab"], ["own", "cd"])
    assert speakers == {
        "agent_id": [None, "solver"],
        "model_id": [None, "small"],
        "index": [None, 0],
        "acc": [None, None],
    }


def test_what_was_written_is_forgotten(store):
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(ROWS))
    transcripts.clear()
    assert transcripts.rewrite(["u_0_0"], ["x"], ["y"])["agent_id"] == [None]
    inputs = ["x"] * 3
    transcripts.rewrite_finals(inputs, ["y"] * 3)
    assert inputs == ["x"] * 3


# -- each session's last row -------------------------------------------------------------------------------------------


def test_the_table_of_samples_gets_each_sessions_last_row(store):
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(["u_0_0", "u_1_0"]))
    transcripts.note(batch(["stock_0_0"]))  # validation comes in batches
    inputs, outputs = ["?"] * 3, ["!"] * 3
    transcripts.rewrite_finals(inputs, outputs)
    assert (inputs, outputs) == (["ab", "GHI", "b"], ["cd", "A", "bb"])


def test_a_table_of_other_rows_is_left_alone_and_said(store, caplog):
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(["u_0_0", "u_0_1"]))  # one session, one final row
    inputs, outputs = ["a", "b"], ["c", "d"]
    transcripts.rewrite_finals(inputs, outputs)
    assert (inputs, outputs) == (["a", "b"], ["c", "d"])
    assert "1 validation samples were noted and 2 are logged" in caplog.text


def test_the_highest_activation_of_a_session_is_its_last():
    assert final_keys(["u_0_0", "u_0_10", "u_0_9", "v_w_1_0"]) == ["u_0_10", "v_w_1_0"]
    assert final_keys([]) == []


# -- against verl's own validation -------------------------------------------------------------------------------------


class Validator(PPOTrainerSync):
    """verl's `_validate` over batches that are there already; notes what it would write."""

    def __init__(self, batches, transcripts):
        self.batches, self.transcripts = list(batches), transcripts
        self.config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(val_kwargs=SimpleNamespace(n=1))),
            trainer={"validation_data_dir": "out"},
        )
        self.tokenizer, self.global_steps = Tokenizer(), 3
        self.val_dataloader = [{"raw_prompt": np.array([["?"]], dtype=object)} for _ in self.batches]
        self.agent_loop_manager = SimpleNamespace(generate_sequences=lambda batch: None)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.replay_buffer = self

    def sample(self, **kwargs):
        sampled = self.batches.pop(0)
        self.transcripts.note(sampled)
        return sampled, {}

    def _maybe_log_val_generations(self, inputs, outputs, scores):
        self.table = (list(inputs), list(outputs))
        self.transcripts.rewrite_finals(inputs := list(inputs), outputs := list(outputs))
        self.rewritten = (inputs, outputs)

    def _dump_generations(self, inputs, outputs, reward_extra_infos_dict, **kwargs):
        self.keys = reward_extra_infos_dict["uid"]
        self.dump = (list(inputs), list(outputs))
        self.speakers = self.transcripts.rewrite(self.keys, inputs, outputs)
        self.rewritten_dump = (inputs, outputs)

    def _val_metrics_update(self, *args, **kwargs):
        return {}


@st.composite
def batches(draw):
    """Keys of validation batches: sessions of several rows, in the order in which they ended."""
    made = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        sessions = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
        keys = [f"{name}_{session}_{i}" for session, count in enumerate(sessions) for i in range(count)]
        made.append(draw(st.permutations(keys)))
    return made


@settings(deadline=None, max_examples=50)  # two busy cores
@given(batches())
def test_final_rows_are_those_of_verls_validation(keys):
    """Text and place of every row, in the table of samples and in the dump, with the tokenizer that verl uses."""
    numbers = {key: i for i, key in enumerate(key for part in keys for key in part)}
    rows = {k: ([1 + i % 26], [1 + i // 26 % 26], {"agent_id": "a", "model_id": "small"}) for k, i in numbers.items()}
    with pytest.MonkeyPatch.context() as patch:
        for module in (trainer_base, transcripts_module):
            patch.setattr(module, "tq", Store(rows))
        validator = Validator([batch(part, partition="val") for part in keys], Transcripts({"small": Tokenizer()}))
        validator._validate()
    assert len(validator.table[0]) == sum(len({k.rpartition("_")[0] for k in part}) for part in keys)
    assert validator.rewritten == validator.table
    assert validator.rewritten_dump == validator.dump
    assert sorted(validator.keys) == sorted(numbers)
    assert validator.speakers["agent_id"] == ["a"] * len(numbers)
    assert validator.speakers["model_id"] == ["small"] * len(numbers)


def test_a_dump_tells_what_failed_and_who_was_right(monkeypatch):
    rows = {
        "u_0_0": ([1], [2], {"agent_id": "solver", "reward_extra_info": {"acc": 1.0}}),
        "u_1_0": ([1], [2], {"agent_id": "solver", "failed": "retrieval", "reward_extra_info": {}}),
        "u_1_1": ([1], [2], {"agent_id": "solver", "failed": "retrieval", "fault": "retrieval"}),
    }
    monkeypatch.setattr(transcripts_module, "tq", Store(rows))
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(rows))
    columns = transcripts.rewrite(list(rows), ["?"] * 3, ["!"] * 3)
    assert columns["acc"] == [1.0, None, None]
    assert columns["failed"] == ["", "retrieval", "retrieval"] and columns["fault"] == ["", "", "retrieval"]


def test_a_row_that_took_over_its_sessions_numbers_has_them(store):
    heir = Row("u", 0, 1, 7, "verifier", "large", metrics={"rounds": 2.0})
    transcripts = Transcripts(TOKENIZERS)
    transcripts.note(batch(["u_0_1", "u_1_0"]), rows={"u_0_1": heir})
    assert [own["session"] for own in transcripts.records(["u_0_1", "u_1_0"])] == [{"rounds": 2.0}, None]


def test_verls_validation_writes_the_other_familys_letters(monkeypatch):
    for module in (trainer_base, transcripts_module):
        monkeypatch.setattr(module, "tq", Store(dict(ROWS)))
    validator = Validator([batch(["u_0_1", "u_0_0"]), batch(["u_1_0"])], Transcripts(TOKENIZERS))
    validator._validate()
    assert validator.table == (["e", "ghi"], ["f", "a"])  # verl's, all with the run's tokenizer
    assert validator.rewritten == (["E", "GHI"], ["F", "A"])
    assert validator.rewritten_dump == (["ab", "E", "GHI"], ["cd", "F", "A"])
    assert validator.speakers["agent_id"] == ["solver", "verifier", "solver"]


class WrittenValidator(Validator, WrittenTrainer):
    """Writes the dump that a team trainer writes."""

    _maybe_log_val_generations = WrittenTrainer._maybe_log_val_generations
    _dump_generations = WrittenTrainer._dump_generations


def test_a_validations_rows_have_rewards_of_their_own(monkeypatch, tmp_path):
    """verl's `score` is that of each session's last row."""
    made = Store(dict(ROWS) | {"u_2_0": ([1], [2], {"agent_id": "solver", "failed": "retrieval"})})
    made.rewards = {"u_0_0": 0.25, "u_0_1": 1.0, "u_1_0": 0.5, "u_2_0": 0.0}
    for module in (trainer_base, transcripts_module):
        monkeypatch.setattr(module, "tq", made)
    validator = WrittenValidator([batch(["u_0_1", "u_0_0"]), batch(["u_1_0", "u_2_0"])], Transcripts(TOKENIZERS))
    validator.config.trainer = OmegaConf.create({"validation_data_dir": str(tmp_path), "log_val_generations": 0})
    validator._init_dump_executor()
    validator._validate()
    validator._shutdown_dump_executor()
    step = read_step(tmp_path / "3.jsonl")
    assert [(row.agent, row.line["score"]) for row in step.rows][:2] == [("solver", 1.0), ("verifier", 1.0)]
    assert [row.reward for row in step.rows] == [0.25, 1.0, 0.5, None]
    shown = view_of(step, choose(step, most=9))
    cards = [card for prompt in shown.prompts for session in prompt.sessions for card in session.activations]
    assert {card.row.line["uid"]: card.reward for card in cards} == {**made.rewards, "u_2_0": None}
    assert [cells[2] for cells in shown.table] == ["0.375", "1.000"]
