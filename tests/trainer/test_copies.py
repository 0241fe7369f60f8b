"""Copies as rows: in the sample store, in the batch, in the statistics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_drmas.advantage import mgrpo_advantage
from verl_drmas.rollout.rows import FIRST_COPY, Row
from verl_drmas.trainer import copies as module
from verl_drmas.trainer.alignment import StepAlignment, copies_of, places
from verl_drmas.trainer.copies import make_copies
from verl_drmas.trainer.metrics import workflow_metrics
from verl_drmas.trainer.row_weights import put_row_weights


def team(*sessions):
    """Rows by key of sessions (uid, number, agents in order); the first bears the session's numbers."""
    made = {}
    for uid, number, agents in sessions:
        for order, agent in enumerate(agents):
            metrics = {"rounds": float(len(agents))} if order == 0 else None
            path = f"{agent}.{agents[:order].count(agent)}"
            made[f"{uid}_{number}_{order}"] = Row(
                uid, number, order, "ab".index(uid), agent, "base", path=path, metrics=metrics
            )
    return made


ROWS = team(
    ("a", 0, ("main", "sub", "sub")),
    ("a", 1, ("main", "sub")),
    ("b", 0, ("main", "sub", "sub", "sub")),
)
COPIES = dict(zip(ROWS, [1, 1, 2, 1, 3, 1, 0, 1, 2], strict=True))


def batch_of(rows, keys=None):
    keys = list(rows) if keys is None else keys
    tags = [{"seq_len": 5, "of": key} for key in keys]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0})


class Store:
    """What a sample store is asked to do."""

    def __init__(self):
        self.cleared, self.got, self.put = [], [], []
        self.calls = SimpleNamespace(kv_clear=self.clear, kv_batch_get=self.get, kv_batch_put=self.store)

    def clear(self, keys, partition_id):
        assert partition_id == "train"
        self.cleared += keys

    def get(self, keys, partition_id):
        assert partition_id == "train"
        self.got.append(list(keys))
        return f"fields of {','.join(keys)}"

    def store(self, keys, partition_id, fields, tags):
        assert partition_id == "train"
        self.put.append((list(keys), fields, tags))


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(module, "tq", made.calls)
    return made


def copied(keys=None, rows=None, copies=None):
    rows, copies = rows or ROWS, copies or COPIES
    batch = batch_of(rows, keys)
    return make_copies(batch, rows, np.array([float(copies[key]) for key in batch.keys]))


def test_dropped_rows_are_cleared_and_copies_stored_under_keys_of_their_own(store):
    batch, rows = copied()
    assert store.cleared == ["b_0_1"]
    sources = ["a_0_2", "a_1_1", "a_1_1", "b_0_3"]
    new = [f"a_0_{FIRST_COPY}", f"a_1_{FIRST_COPY + 1}", f"a_1_{FIRST_COPY + 2}", f"b_0_{FIRST_COPY + 3}"]
    assert store.got == [sources]
    ((keys, fields, tags),) = store.put
    assert (keys, fields) == (new, f"fields of {','.join(sources)}")
    assert [tag["of"] for tag in tags] == sources
    assert batch.keys == [key for key in ROWS if key != "b_0_1"] + new
    assert [tag["of"] for tag in batch.tags] == batch.keys[:8] + sources
    assert (batch.partition_id, batch.extra_info) == ("train", {"temperature": 1.0})
    assert set(rows) == set(batch.keys)


def test_copies_tags_are_not_the_rows_own(store):
    """verl writes into tags."""
    batch, _ = copied()
    batch.tags[-1]["seq_len"] = 9
    assert [tag["seq_len"] for tag in batch.tags[:-1]] == [5] * 11


def test_a_copy_is_its_row_but_for_its_number_and_the_sessions_numbers(store):
    _, rows = copied(copies={**COPIES, "a_0_0": 2})
    copy = rows[f"a_0_{FIRST_COPY}"]
    source = ROWS["a_0_0"]
    assert source.metrics is not None and copy.metrics is None
    assert vars(copy) == {**vars(source), "activation": FIRST_COPY, "metrics": None}
    assert (
        Row.read(f"a_0_{FIRST_COPY}", {"agent_id": "main", "path": "main.0"}, 0, "base") == copy
    )  # verl's form of a key


def test_nothing_to_copy_or_drop_asks_the_store_nothing(store):
    batch, rows = copied(copies=dict.fromkeys(ROWS, 1))
    assert (batch.keys, rows) == (list(ROWS), ROWS)
    assert (store.cleared, store.got, store.put) == ([], [], [])


def test_a_sessions_numbers_count_once_also_where_the_row_that_bore_them_is_dropped(store):
    rows = team(("a", 0, ("sub", "main", "sub")), ("a", 1, ("main", "sub")))
    plain = workflow_metrics(list(rows.values()), None)
    assert plain == {"drmas/workflow/rounds": 2.5}
    _, left = copied(rows=rows, copies={"a_0_0": 0, "a_0_1": 1, "a_0_2": 2, "a_1_0": 1, "a_1_1": 2})
    assert workflow_metrics(list(left.values()), None) == plain
    assert left["a_0_1"].metrics == {"rounds": 3.0}  # the session's first row that is left
    assert rows["a_0_1"].metrics is None


def test_keys_do_not_depend_on_which_session_ended_first(store):
    wanted = {(row.uid, row.session, row.activation): row.path for row in copied()[1].values()}
    for keys in (list(ROWS)[::-1], [*list(ROWS)[4:], *list(ROWS)[:4]]):
        rows = copied(keys)[1]
        assert {(row.uid, row.session, row.activation): row.path for row in rows.values()} == wanted


@pytest.mark.parametrize("mode", ["sample", "mask"])
def test_statistics_of_physical_copies_are_the_weighted_ones(store, mode):
    rng = np.random.default_rng(0)
    rows = team(*((uid, n, ("main", *["sub"] * int(rng.integers(0, 6)))) for uid in "ab" for n in range(4)))
    rewards = dict(zip(rows, rng.random(len(rows)), strict=True))
    step = StepAlignment(("sub",), {"sub": 3}, mode, 0, 4)

    def advantages(keys, known, aligned):
        result = mgrpo_advantage(
            [rewards[key] for key in keys],
            uid=[row.uid for row in known],
            session=[row.session for row in known],
            agent_id=[row.agent_id for row in known],
            activation=places(known),
            index=[row.index for row in known],
            ddof=1,
            eps=1e-6,
            **vars(aligned),
        )
        return result.advantage

    known = list(rows.values())
    weighted = dict(zip(rows, advantages(rows, known, step), strict=True))
    counts = copies_of(known, step)
    batch, left = make_copies(batch_of(rows), rows, counts)
    sources = [tag["of"] for tag in batch.tags]
    none = StepAlignment(("sub",), {"sub": 3}, "none", 0, 4)
    physical = advantages(sources, [left[key] for key in batch.keys], none)
    np.testing.assert_allclose(physical, [weighted[source] for source in sources], rtol=1e-12)
    assert {key: sources.count(key) for key in rows} == dict(zip(rows, counts.astype(int), strict=True))
    assert 0 in counts and (mode == "mask" or counts.max() > 1)


# -- verl's sample store itself ----------------------------------------------------------------------------------------


def stored(prompt, response, row):
    """A row as verl's agent loop stores it."""
    prompts, responses = torch.arange(prompt), torch.arange(response) + 100 * row.activation
    ones = torch.ones(response, dtype=torch.int64)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": ones,
        "loss_mask": ones,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(prompt + response),
        "rm_scores": torch.linspace(0, 1, response),
        "rollout_log_probs": -torch.linspace(1, 2, response),
        "row_temperature": torch.tensor(0.5),
        "multi_modal_inputs": {},
        "num_turns": 2,
        "uid": row.uid,
        "index": 0,
        "reward_model": {"ground_truth": "x"},
        "extra_fields": {"agent_id": row.agent_id, "path": row.path, "session_metrics": row.metrics},
    }


def fill():
    """`ROWS` put session by session, in equal lengths (which verl stacks) and others."""
    lengths = dict(zip(ROWS, [(4, 5), (3, 2), (3, 2), (4, 5), (4, 5), (2, 9), (5, 1), (6, 3), (7, 4)], strict=True))
    tags = {key: {"status": "success", "seq_len": sum(size), "max_global_steps": 0} for key, size in lengths.items()}
    for start in ("a_0", "a_1", "b_0"):
        keys = [key for key in ROWS if key.startswith(start)]
        fields = list_of_dict_to_tensordict([stored(*lengths[key], ROWS[key]) for key in keys])
        tq.kv_batch_put(keys=keys, fields=fields, tags=[tags[key] for key in keys], partition_id="train")
    return KVBatchMeta(keys=list(ROWS), tags=[tags[key] for key in ROWS], partition_id="train", extra_info={})


def plain(key):
    """All fields of one stored row."""
    data = tq.kv_batch_get([key], "train")
    return {
        name: data[name].unbind()[0].tolist() if isinstance(data[name], torch.Tensor) else next(iter(data[name]))
        for name in data.keys()  # noqa: SIM118  a TensorDict iterates over rows
    }


def test_real_copies_hold_what_their_rows_hold_and_pass_verls_later_steps(queue):
    batch = fill()
    before = {key: plain(key) for key in ROWS}
    batch, rows = make_copies(batch, ROWS, np.array([float(c) for c in COPIES.values()]))
    listed = tq.kv_list("train")["train"]
    assert listed == dict(zip(batch.keys, batch.tags, strict=True))
    for key, row in rows.items():
        source = next(k for k, r in ROWS.items() if (r.uid, r.session, r.path) == (row.uid, row.session, row.path))
        assert plain(key) == before[source], key
    assert sum(row.activation >= FIRST_COPY for row in rows.values()) == 4

    # The trainer writes a field into every row; verl pads with a row made from the batch's first.
    batch.reorder(list(range(len(batch)))[::-1])
    put_row_weights(batch, np.arange(len(batch), dtype=float))
    padded = upsample_batch_to_divisible_size(batch, 8, 0)
    assert (len(batch), len(padded)) == (12, 16)
    assert [tag["seq_len"] for tag in padded.tags[-4:]] == [128] * 4
    data = tq.kv_batch_get(padded.keys, "train", select_fields=["rollout_is_weights", "extra_fields"])
    assert [float(row[0]) for row in data["rollout_is_weights"].unbind()][:12] == list(range(12))
    assert [fields["path"] for fields in data["extra_fields"]][:12] == [rows[key].path for key in batch.keys]
    tq.kv_clear(keys=padded.keys, partition_id="train")
    assert not tq.kv_list("train").get("train")
