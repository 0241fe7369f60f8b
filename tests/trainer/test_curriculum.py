"""Stages that follow each other: verl's own data set and loader over small files, without Ray."""

import copy
import io
import logging
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_drmas.config import ConfigError, StageConfig, parse
from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.data.stages import check_curriculum, stage_files

curriculum = pytest.importorskip("verl_drmas.trainer.curriculum", reason="verl is not installed")
trainer_base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base")

BATCH = 4
FORMAT = "drmas/workflow/main_format"


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Stage 1 has the indices 0 to 9, stage 2 in two files 100 to 105 and 200 to 202."""
    folder = tmp_path_factory.mktemp("stages")

    def write(name, indices):
        rows = [prompt_row(f"q {i}", str(i), data_source="s", split="train", index=i) for i in indices]
        return str(write_rows(rows, folder / name))

    return {
        "easy": [write("easy.parquet", range(10))],
        "hard": [write("a.parquet", range(100, 106)), write("b.parquet", range(200, 203))],
    }


def stages(files, **ends):
    ends = ends or {"until_step": 3}
    return [{"name": "easy", "files": files["easy"], **ends}, {"name": "hard", "files": files["hard"]}]


class Trainer(curriculum.StagedTrainer):
    """What `_init_dataloader` and a step need of a trainer."""

    def __init__(self, section, tokenizer, tmp_path, **data):
        self.section, self.tokenizer, self.processor = section, tokenizer, None
        self.trainer_mode, self.parameter_sync_step, self.global_steps = "sync", 1, 0
        files = stage_files(section) or data.pop("train_files")
        self.config = OmegaConf.create(
            {
                "data": {
                    "train_files": files,
                    "val_files": files[:1],
                    "train_batch_size": BATCH,
                    "val_batch_size": None,
                    "dataloader_num_workers": 0,
                    "shuffle": True,
                    "seed": 5,
                    "cache_dir": str(tmp_path),
                    "filter_overlong_prompts_workers": None,
                    "max_prompt_length": 8,
                    **data,
                },
                "algorithm": {},
                "trainer": {"total_epochs": 7, "total_training_steps": None, "v1": {"sampler": {}}},
                "actor_rollout_ref": {"actor": {"optim": {"total_training_steps": -1}}},
            }
        )
        self._init_dataloader()

    def steps(self, count, metrics=None):
        """The indices of each of so many steps, and the numbers that each logs."""
        drawn = []
        for _ in range(count):
            self.global_steps += 1
            batch = self._next_train_batch()
            drawn.append([int(i) for i in batch["index"]])
            self.logged = self.look_at_stage((metrics or (lambda step: {}))(self.global_steps))
        return drawn

    def save(self):
        file = io.BytesIO()
        torch.save((self.train_dataloader.state_dict(), self.stage_state()), file)
        return file.getvalue()

    def load(self, saved, step):
        data, state = torch.load(io.BytesIO(saved), weights_only=False)
        self.train_dataloader.load_state_dict(data)
        self.load_stage_state(state)
        self.global_steps = step
        return self


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """verl's data sets by their files: building one takes a while, and nothing changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield {}


@pytest.fixture
def make(files, tokenizer, known, tmp_path, monkeypatch):
    real = curriculum.create_rl_dataset

    def once(paths, config, *args, **kwargs):
        if tuple(paths) not in known:
            known[tuple(paths)] = real(paths, config, *args, **kwargs)
        return known[tuple(paths)]

    monkeypatch.setattr(curriculum, "create_rl_dataset", once)
    monkeypatch.setattr(trainer_base, "create_rl_dataset", once)

    def build(curriculum=None, **data):
        section = parse({"curriculum": stages(files) if curriculum is None else curriculum})
        return Trainer(section, tokenizer, tmp_path, **data)

    return build


def test_a_stage_gives_its_own_rows_in_whole_rounds_that_differ(make):
    drawn = make().steps(11)
    easy, hard = drawn[:3], drawn[3:]
    assert all(set(step) <= set(range(10)) for step in easy)
    assert all(set(step) <= {*range(100, 106), *range(200, 203)} for step in hard)
    assert all(len(set(step)) == BATCH for step in drawn)  # no prompt twice in a step, rounds' ends too
    rounds = [hard[i] + hard[i + 1] for i in range(0, 8, 2)]  # 9 rows, batches of 4: two a round
    assert all(len(set(rows)) == 8 for rows in rounds)
    assert len({tuple(rows) for rows in rounds}) == 4
    assert set().union(*hard) == {*range(100, 106), *range(200, 203)}  # what a round leaves over has its turn


def test_without_shuffle_rows_come_in_the_order_of_the_files(make):
    drawn = make(shuffle=False).steps(6)
    assert drawn[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert drawn[3:] == [[100, 101, 102, 103], [104, 105, 200, 201], [100, 101, 102, 103]]


def test_the_seed_decides_the_order(make):
    assert make().steps(6) == make().steps(6) != make(seed=6).steps(6)
    assert make(seed=None).steps(2) == make(seed=None).steps(2)
    assert len(make(seed=-3).steps(2)) == 2


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 6])
def test_a_resumed_run_goes_on_with_the_rows_of_an_uninterrupted_one(make, at):
    whole = make().steps(9)
    first = make()
    assert first.steps(at) == whole[:at]
    saved = first.save()
    assert make().load(saved, at).steps(9 - at) == whole[at:]
    assert first.steps(9 - at) == whole[at:]  # a save changes nothing for the run that goes on


def test_single_prompt_fetches_change_no_row(make):
    assert make(gen_batch_size=1).steps(6) == make().steps(6)


def test_a_resumed_run_keeps_the_seed_it_began_with(make):
    whole = make().steps(8)
    first = make()
    first.steps(2)
    assert make(seed=99).load(first.save(), 2).steps(6) == whole[2:]


def test_a_resume_before_any_fetch_may_save_again(make):
    whole = make().steps(6)
    first = make()
    first.steps(3)
    second = make().load(first.save(), 3)
    assert make().load(second.save(), 3).steps(3) == whole[3:]


def test_metric_held_for_some_steps_ends_a_stage(make, files):
    values = {1: 0.95, 2: 0.8, 3: 0.9, 4: 0.97, 5: 0.0}
    trainer = make(stages(files, until_metric=FORMAT, above=0.9, for_steps=2))
    streaks, drawn = [], []
    for _ in range(5):
        drawn += trainer.steps(1, lambda step: {FORMAT: values[step]})
        streaks.append((trainer.logged["drmas/curriculum/stage"], trainer.logged["drmas/curriculum/streak"]))
    assert streaks == [(1, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [min(step) >= 100 for step in drawn] == [False] * 4 + [True]


def test_a_streak_survives_a_resume(make, files):
    ends = stages(files, until_metric=FORMAT, above=0.9, for_steps=3)
    good = {FORMAT: 1.0}
    whole = make(ends).steps(6, lambda step: good)
    assert [min(step) >= 100 for step in whole] == [False] * 3 + [True] * 3
    first = make(ends)
    first.steps(2, lambda step: good)
    assert make(ends).load(first.save(), 2).steps(4, lambda step: good) == whole[2:]


def test_a_step_without_the_metric_ends_a_streak_and_whichever_end_comes_first_counts(make, files):
    trainer = make(stages(files, until_metric=FORMAT, above=0.9, for_steps=2, until_step=4))
    drawn = trainer.steps(5, lambda step: {FORMAT: 1.0} if step % 2 else {})
    assert [min(step) >= 100 for step in drawn] == [False] * 4 + [True]


def test_a_metric_that_never_comes_is_warned_about_once_with_the_nearest(make, files, caplog):
    trainer = make(stages(files, until_metric="drmas/workflow/main_fromat", above=0.9, for_steps=3))
    with caplog.at_level(logging.WARNING):
        trainer.steps(2, lambda step: {FORMAT: 1.0})
        assert not [r for r in caplog.records if "waits for the metric" in r.message]
        trainer.steps(6, lambda step: {FORMAT: 1.0})
    told = [r.message for r in caplog.records if "waits for the metric" in r.message]
    assert len(told) == 1
    assert f"did you mean '{FORMAT}'?" in told[0]


def test_a_metric_that_comes_now_and_then_is_not_warned_about(caplog):
    watch = curriculum.StageWatch([StageConfig("a", ["f"], until_metric=FORMAT, above=2.0, for_steps=2)])
    for step in range(1, 9):
        watch.look(0, {FORMAT: 1.0} if step == 2 else {}, step)
    assert not caplog.records


def test_a_switch_is_said(make, caplog):
    with caplog.at_level(logging.WARNING):
        make().steps(4)
    told = [r.message for r in caplog.records if "follows" in r.message]
    assert told == ["curriculum: stage hard follows easy: step 3 is done"]


def test_length_and_schedule_stay_the_configurations(make, files):
    plain = make([], train_files=files["easy"] + files["hard"])
    staged = make()
    for trainer in (plain, staged):
        assert trainer.total_training_steps == 19 // BATCH * 7
        assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 19 // BATCH * 7
        assert trainer.steps_per_epoch == 4
    assert plain.look_at_stage({}) == {} == plain.stage_state()


def test_what_a_step_decides_is_there_before_verl_saves(make, monkeypatch):
    trainer = make()
    monkeypatch.setattr(
        curriculum.PPOTrainerSync, "step", lambda self, metrics, timing_raw: metrics.update({"x": 1.0}) or "batch"
    )
    trainer.global_steps, metrics = 3, {}
    assert trainer.step(metrics, {}) == "batch"
    assert metrics == {"x": 1.0, "drmas/curriculum/stage": 1.0, "drmas/curriculum/streak": 0.0}
    assert trainer.stage_sampler.stage == 1


def test_a_checkpoint_with_a_curriculum_and_a_run_without_are_refused_both_ways(make, files):
    plain, staged = make([], train_files=files["easy"]), make()
    with pytest.raises(ConfigError, match=r"saved without a curriculum, and drmas.curriculum is set now"):
        staged.load_stage_state(plain.stage_state())
    with pytest.raises(ConfigError, match=r"saved with a curriculum, and drmas.curriculum is empty now"):
        plain.load_stage_state(staged.stage_state())
    plain.load_stage_state({})


def test_a_stage_whose_files_changed_begins_a_round_and_a_lost_stage_is_refused(caplog):
    sampler = curriculum.StageSampler([10, 9], batch_size=BATCH)
    sampler.move_on()
    it = iter(sampler)
    first = [next(it) for _ in range(5)]
    state = sampler.state_dict()
    grown = curriculum.StageSampler([7, 12], batch_size=BATCH)
    with caplog.at_level(logging.WARNING):
        grown.load_state_dict(state)
    assert "stage 2 had 9 rows when the checkpoint was saved and has 12 now" in caplog.text
    again = iter(grown)
    assert len({next(again) for _ in range(12)}) == 12 and min(first) >= 10
    with pytest.raises(ConfigError, match=r"in stage 2 of its curriculum, and drmas.curriculum has 1 stages"):
        curriculum.StageSampler([10], batch_size=BATCH).load_state_dict(state)


def test_a_stage_that_the_length_filter_leaves_too_small_is_refused(make, files, tmp_path):
    rows = [prompt_row("q " * (9 if i > 2 else 2), "1", data_source="s", split="train", index=i) for i in range(9)]
    long = str(write_rows(rows, tmp_path / "long.parquet"))
    with pytest.raises(ConfigError, match=r"curriculum.1: 3 rows are left after data.filter_overlong_prompts"):
        make(stages(files | {"hard": [long]}))


# -- the check before a run


def configuration(**keys):
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": BATCH, "dataloader_num_workers": 0},
            "algorithm": {"filter_groups": {"enable": False}},
            "trainer": {"total_training_steps": 20, "v1": {"sampler": {"sync_refill_failed_groups": False}}},
        }
    )
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def test_a_good_curriculum_passes_and_its_files_are_the_union(files):
    section = parse({"curriculum": stages(files), "request_seed": 1})
    check_curriculum(configuration(), section)
    assert stage_files(section) == files["easy"] + files["hard"]
    again = [*stages(files, until_step=2), {"name": "all", "files": files["easy"] + files["hard"]}]
    again[1]["until_step"] = 5
    section = parse({"curriculum": again, "request_seed": 1})
    check_curriculum(configuration(), section)  # rows of an earlier stage may come again
    assert stage_files(section) == files["easy"] + files["hard"]
    check_curriculum(configuration(data__dataloader_num_workers=8), parse({}))  # no curriculum, nothing to say
    assert stage_files(parse({})) == []


@pytest.mark.parametrize(
    ("keys", "ends", "says"),
    [
        ({"data__dataloader_num_workers": 8}, {}, "data.dataloader_num_workers is 8.*set it to 0"),
        ({"algorithm__filter_groups__enable": True}, {}, "algorithm.filter_groups.enable is true"),
        ({"trainer__v1__sampler__sync_refill_failed_groups": True}, {}, "sync_refill_failed_groups is true"),
        ({"data__train_batch_size": 10}, {}, r"curriculum.1 \(hard\).files has 9 rows, less than one batch"),
        ({}, {"until_step": 20}, "until_step is 20, but the run ends at trainer.total_training_steps=20"),
        ({}, {"until_metric": "val-core/s/acc/mean@1", "above": 0.5}, "only after its checkpoint is written"),
        ({"data__prompt_key": "question"}, {}, r"curriculum.0 \(easy\).files: .*no column 'question'"),
    ],
)
def test_what_cannot_be_is_refused(files, keys, ends, says):
    with pytest.raises(ConfigError, match=says) as error:
        check_curriculum(configuration(**keys), parse({"curriculum": stages(files, **ends)}))
    assert "\n" not in str(error.value)


def test_files_are_looked_at(files, tmp_path):
    def refused(says, first, **section):
        with pytest.raises(ConfigError, match=says):
            check_curriculum(configuration(), parse({"curriculum": stages(files | {"easy": first}), **section}))

    refused(r"curriculum.0 \(easy\).files: .*nowhere.parquet: no such file", [str(tmp_path / "nowhere.parquet")])
    refused("names a file twice", files["easy"] * 2)
    copied = tmp_path / "copy.parquet"
    copied.write_bytes(Path(files["easy"][0]).read_bytes())
    refused("extra_info.index repeats", [*files["easy"], str(copied)], request_seed=1)
    rows = [prompt_row(f"q {i}", "", data_source="s", split="train", index=i) for i in range(4)]
    blank = str(write_rows(rows, tmp_path / "blank.parquet"))
    refused("ground_truth is missing", [blank], workflow={"name": "delegate"})
    section = parse({"curriculum": stages(files | {"easy": [blank]})})
    check_curriculum(configuration(), section)  # a stock loop scores as it likes


def test_stages_end_one_after_the_other(files):
    three = copy.deepcopy(stages(files, until_step=5))
    three[1]["until_step"] = 5
    three.append({"name": "last", "files": files["easy"]})
    with pytest.raises(ConfigError, match=r"curriculum.1 \(hard\): until_step is 5, but a stage before it ends at 5"):
        check_curriculum(configuration(), parse({"curriculum": three}))
