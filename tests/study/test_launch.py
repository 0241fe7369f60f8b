"""Commands of recipes: what stands in them, and that Hydra reads every text as it was."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_drmas.study.launch import SEEDED, launch, launch_pair


def values(arguments):
    return {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(arguments)}


@pytest.fixture
def run(tmp_path):
    return launch(
        "drmas_math",
        ["a=1"],
        project="study",
        experiment="small",
        runs=tmp_path / "it's all, here",
        seed=3,
        environment={"URLS": "[http://a:1,http://b:2]"},
        further=["a=2"],
    )


def test_a_run_has_a_folder_of_its_own_for_all_it_leaves(run, tmp_path):
    folder = tmp_path / "it's all, here" / "study" / "small_seed3"
    assert run.folder == folder
    found = values(run.arguments[2:])
    assert found["trainer.default_local_dir"] == str(folder / "checkpoints")
    assert found["hydra.run.dir"] == str(folder / "hydra")
    assert (found["trainer.project_name"], found["trainer.experiment_name"]) == ("study", "small_seed3")
    assert {key: found[key] for key in SEEDED} == dict.fromkeys(SEEDED, 3)
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    assert found[f"{variables}.VERL_FILE_LOGGER_PATH"] == str(folder / "metrics.jsonl")
    assert found[f"{variables}.URLS"] == "[http://a:1,http://b:2]"  # a text, and no list


def test_the_recipes_choices_come_first_and_the_users_last(run):
    assert run.arguments[:3] == ["--config-name", "drmas_math", "a=1"]
    assert run.arguments[-1] == "a=2"


def test_what_is_shown_is_what_is_run(run):
    assert shlex.split(run.shown()) == ["python", *run.command[1:]]


def test_a_start_keeps_the_metrics_of_an_earlier_one(run, monkeypatch):
    """verl goes on from its last checkpoint and begins its log anew."""
    monkeypatch.setattr("verl_drmas.study.launch.os.execv", lambda path, command: None)
    log = run.folder / "metrics.jsonl"
    for number in (1, 2, 3):
        run.start()
        assert not log.exists()
        log.write_text(f"start {number}")
    kept = {path.name: path.read_text() for path in run.folder.glob("*.jsonl")}
    assert kept == {"metrics.1.jsonl": "start 1", "metrics.2.jsonl": "start 2", "metrics.jsonl": "start 3"}


def test_the_jobs_of_a_pair_share_all_but_names_and_what_is_of_one_alone(tmp_path):
    pair = launch_pair(
        ("a_main", "a_sub"),
        ["a=1"],
        project="study",
        experiment="small",
        runs=tmp_path,
        seed=3,
        of_each={"sub": ["b=2"]},
        further=["a=3"],
    )
    assert pair.folder == tmp_path / "study" / "small_seed3"
    for name, job in {"main": pair.main, "sub": pair.sub}.items():
        assert job.config == f"a_{name}" and (job.overrides[0], job.overrides[-1]) == ("a=1", "a=3")
        found = values(job.overrides)
        assert found["trainer.experiment_name"] == f"small_seed3_{name}"
        assert {key: found[key] for key in SEEDED} == dict.fromkeys(SEEDED, 3)
        assert found.get("b") == (2 if name == "sub" else None)
