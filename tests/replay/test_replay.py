"""A step that was trained, dumped and replayed: its own estimator gives its advantages again, to the bit."""

import json

import numpy as np
import pytest
from recorded_jobs import CASES, SUBS, player, train, trainee
from typer.testing import CliRunner

from verl_drmas.cli import app
from verl_drmas.dumps import COLUMN, DumpError, read_step
from verl_drmas.replay.arms import NAMES, arm_of
from verl_drmas.replay.compare import compare
from verl_drmas.replay.run import Trained, replay
from verl_drmas.support import GROUP_ESTIMATORS
from verl_drmas.trainer.metrics import WHOLE_TEAM

STEP = 2
MORE = {
    "stock grpo": {"estimator": "grpo", "weights": False},
    "stock rloo": {"estimator": "rloo", "weights": False},
    "rloo by agent, with KL": {
        "estimator": "drmas_per_agent",
        "base": "rloo",
        "group_by": "agent",
        "kl": 0.3,
        "weights": False,
    },
    "drmas, with KL": {"estimator": "drmas", "kl": 0.3, "weights": False},
}
ALL = CASES | MORE


@pytest.fixture(scope="module")
def runs(queue, tmp_path_factory):
    """By case: the dump of a step, and the advantages that each model was given, by key."""
    known = {}

    def run(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("dump")
            made = player("one", "", ALL[name], seed=3, dump=str(folder))
            train(made, STEP)
            given = {one[0]: one[1] for policy in made.trained.values() for one in policy.seen if one != "padding"}
            known[name] = (folder / f"{STEP}.jsonl", given)
        return known[name]

    return run


def by(file, name=None, **changes):
    step = read_step(file)
    arm, trained = arm_of(step, name, changes), Trained.of(step)
    return compare(trained, replay(trained, arm))


def command(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


# -- the step's own estimator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_what_was_trained_comes_again_to_the_bit(name, runs):
    file, given = runs(name)
    step = read_step(file)
    trained = Trained.of(step)
    again = replay(trained, arm_of(step, None, {}))
    assert {row.line["uid"] for row in trained.rows} == set(given)
    pushed = 0
    for row, values in zip(trained.rows, again.tokens, strict=True):
        fields = given[row.line["uid"]]
        wanted = [a for a, m in zip(fields["advantages"], fields["response_mask"], strict=True) if m]
        assert values.tolist() == wanted  # no tolerance: the same float32
        pushed += any(wanted)
    assert pushed > 10
    made = compare(trained, again)
    assert made.same and made.difference == 0.0 and again.arm.own and not made.broken
    own = [row.trained["reward"] != row.reward for row in trained.rows]
    assert all(own) if "KL" in name else not any(own)


def test_the_metrics_are_those_that_were_logged(queue, tmp_path):
    made = player("one", "", ALL["sample"], seed=3, dump=str(tmp_path))
    logged = train(made, STEP)["sub"].metrics
    found = by(tmp_path / f"{STEP}.jsonl").replayed.metrics
    assert len(found) > 40 and {name: logged[name] for name in found} == found


def tampered(file, tmp_path, change):
    lines = [json.loads(line) for line in file.open(encoding="utf-8")]
    change([line for line in lines if line[COLUMN] and "trained" in line[COLUMN]])
    path = tmp_path / file.name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def other_reward(rows):
    next(row for row in rows if row["agent_id"] == "main")[COLUMN]["trained"]["reward"] += 0.5


def other_agent(rows):
    next(row for row in rows if row["agent_id"] == "finder")["agent_id"] = "reader"


def other_validity(rows):
    row = next(row for row in rows if row["agent_id"] == "finder")
    row[COLUMN]["valid"] = not row[COLUMN]["valid"]


def other_option(rows):
    next(row for row in rows if "settings" in row[COLUMN])[COLUMN]["settings"]["section"]["advantage"]["ddof"] = 0


def other_seed(rows):
    next(row for row in rows if "settings" in row[COLUMN])[COLUMN]["settings"]["alignment"]["seed"] += 1


@pytest.mark.parametrize("change", [other_reward, other_agent, other_validity, other_option, other_seed])
def test_a_dump_that_is_not_as_trained_would_show(change, runs, tmp_path):
    file, _ = runs("sample")
    path = tampered(file, tmp_path, change)
    assert by(path).broken
    done = command(path, "--step", STEP)
    assert done.exit_code == 2 and "NOT as trained" in done.stdout and "please report it" in done.stderr


# -- other estimators and switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["drmas", "grpo_team", "stock grpo", "stock rloo", "rloo by agent"])
def test_another_estimator_gives_what_its_own_run_trained(other, runs):
    """The sessions are the same in every case, so that one run's dump can tell what another run has trained."""
    file, _ = runs("drmas" if other != "drmas" else "grpo_team")
    theirs, _ = runs(other)
    name, more = ALL[other].get("base") or ALL[other]["estimator"], {}
    if ALL[other].get("group_by"):
        more["drmas.group_by"] = "agent"
    made = by(file, name, **more)
    wanted = {row.line["uid"]: row.trained["advantage"] for row in read_step(theirs).rows if row.trained}
    rows = Trained.of(read_step(file)).rows
    found = {row.line["uid"]: float(own[0]) for row, own in zip(rows, made.replayed.tokens, strict=True)}
    assert found.keys() == wanted.keys()
    assert np.allclose([found[key] for key in wanted], list(wanted.values()), rtol=0, atol=1e-6)
    assert not made.same and not made.broken and made.difference > 0.1


def test_alignment_can_be_replayed_on_a_run_without_it(runs):
    file, _ = runs("drmas")
    theirs, _ = runs("expected")
    changes = {
        "alignment.aligned": "[finder, reader]", "drmas.alignment.target": "3", "drmas.alignment.mode": "expected",
    }  # fmt: skip
    made = by(file, "mgrpo", **changes)
    wanted = {row.line["uid"]: row.trained for row in read_step(theirs).rows if row.trained}
    for row, own, copies in zip(
        Trained.of(read_step(file)).rows, made.replayed.tokens, made.replayed.copies, strict=True
    ):
        assert own[0] == pytest.approx(wanted[row.line["uid"]]["advantage"], abs=1e-6)
        assert copies == wanted[row.line["uid"]]["copies"]
    with pytest.raises(DumpError, match=r"didn't align trajectories, and mgrpo needs to know how: --set align") as told:
        by(file, "mgrpo")
    assert "--set drmas.alignment.target=8 (its agents: " in str(told.value)
    with pytest.raises(DumpError, match=r"alignment.aligned=nobody: the team has no such agent"):
        by(file, "mgrpo", **changes | {"alignment.aligned": "[nobody]"})


@pytest.mark.parametrize(
    ("changes", "which"),
    [
        ({"drmas.advantage.ddof": "0"}, {"main", *SUBS}),
        ({"drmas.advantage.penalty": "outside"}, {"finder"}),  # no other made an invalid action
        ({"drmas.agents.finder.invalid_penalty": "0"}, {"finder"}),
        ({"algorithm.norm_adv_by_std_in_grpo": "false"}, {"main", *SUBS}),
    ],
)
def test_a_switch_changes_its_agents_and_no_other(changes, which, runs):
    file, _ = runs("drmas")
    made = by(file, None, **changes)
    assert {agent for agent, own in made.agents.items() if own["difference"] > 1e-6} == which
    assert not made.replayed.arm.own and not made.broken


def test_a_setting_that_is_the_runs_own_changes_nothing(runs):
    made = by(runs("drmas")[0], "drmas", **{"drmas.advantage.ddof": "1"})
    assert made.replayed.arm.own and made.same


def test_sign_flips_are_those_of_the_rows(runs):
    file, _ = runs("grpo_team")
    made = by(file, "drmas")
    rows = Trained.of(read_step(file)).rows
    for agent, own in made.agents.items():
        pairs = [
            (row.trained["advantage"], float(now[0]))
            for row, now in zip(rows, made.replayed.tokens, strict=True)
            if row.agent == agent
        ]
        assert own["rows"] == len(pairs)
        assert own["flips"] == pytest.approx(np.mean([a * b < -1e-15 for a, b in pairs]))
        assert own["mean"] == pytest.approx(np.mean([b for _, b in pairs]), abs=1e-6)
        assert own["abs_mean"] == pytest.approx(np.mean([abs(b) for _, b in pairs]), abs=1e-6)
    assert sum(own["flips"] for own in made.agents.values()) > 0


# -- what can't be replayed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name", "changes", "says"),
    [
        ("physical", "drmas", {}, r"copies of rows and dropped others \(drmas.alignment.copies=physical\)"),
        ("physical", None, {"drmas.advantage.ddof": "0"}, "only the step's own estimator can be replayed"),
        ("drmas", "gae", {}, "gae can't be replayed from rows: it needs a critic"),
        ("drmas", "drma", {}, "--estimator drma is unknown; did you mean 'drmas'"),
        ("drmas", None, {"drmas.advantage.dof": "0"}, "doesn't read it; did you mean 'drmas.advantage.ddof'"),
        ("drmas", None, {"drmas.advantage.ddof": "7"}, "--set drmas.advantage.ddof: 7 is not valid"),
        ("drmas", None, {"drmas.advantage.eps": "[1"}, "not a value in YAML"),
        ("drmas", None, {"algorithm.norm_adv_by_std_in_grpo": "no idea"}, "true or false"),
        ("sample", None, {"drmas.alignment.mode": "smaple"}, "mode='smaple' is unknown: did you mean 'sample'"),
    ],
)
def test_what_the_rows_cant_tell_is_refused_with_the_reason(case, name, changes, says, runs):
    with pytest.raises(DumpError, match=says):
        by(runs(case)[0], name, **changes)


def test_one_job_of_a_pair_knows_its_own_agents_only(queue, tmp_path):
    url = f"sqlite:///{tmp_path}/pair.db"
    main, sub = player("main", url, ALL["sample"], seed=2), trainee(url, ALL["sample"], dump=str(tmp_path / "sub"))
    logged = (train(main, 1), train(sub, 1))[1]["sub"].metrics
    sub.consumer.detach()
    file = tmp_path / "sub" / "1.jsonl"
    found = by(file).replayed.metrics
    assert found and found == {name: logged[name] for name in found}  # over all sessions that were played
    assert not any(WHOLE_TEAM.match(name) for name in found)
    report = command(file, "--step", 1).stdout
    assert {
        tuple(cell.strip() for cell in line.split("|")[8:11]) for line in report.splitlines() if "| mgrpo |" in line
    } == {("-", "-", "-")}
    assert by(file).same and not by(file, "drmas").same
    for name in ("grpo_team", "drmas_mean", "grpo"):
        with pytest.raises(DumpError, match=f"one job's agents of a pair, and {name} compares an agent with its team"):
            by(file, name)
    assert set(by(file, "rloo", **{"drmas.group_by": "agent"}).agents) == set(SUBS)


def test_rows_that_are_missing_are_noticed(runs, tmp_path):
    file, _ = runs("drmas")
    third = next(row for row in read_step(file).rows if row.trained and row.trained["position"] == 3)
    lines = file.open(encoding="utf-8").readlines()
    cut = tmp_path / file.name
    cut.write_text("".join(lines[: third.number - 1] + lines[third.number :]), encoding="utf-8")
    with pytest.raises(DumpError, match=rf"has {len(lines) - 1} of its {len(lines)} rows"):
        by(cut)
    fourth = next(row for row in read_step(file).rows if row.trained and row.trained["position"] == 4)
    lines[third.number - 1] = lines[fourth.number - 1]
    cut.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(DumpError, match="rows are missing or doubled"):
        by(cut)
    path = tampered(file, tmp_path, lambda rows: rows[2][COLUMN]["spans"][-1].__setitem__(1, 99))
    with pytest.raises(DumpError, match=r"line \d+: its spans have \d+ trained tokens"):
        by(path)


def test_validation_was_not_trained(runs, tmp_path):
    def forget(rows):
        for row in rows:
            del row[COLUMN]["trained"]
            row[COLUMN].pop("settings", None)

    path = tampered(runs("drmas")[0], tmp_path, forget)
    with pytest.raises(DumpError, match="nothing was trained on its rows"):
        by(path)


# -- the command -------------------------------------------------------------------------------------------------------


def test_every_estimator_that_is_named_runs(runs):
    file, _ = runs("drmas")
    for name in NAMES:
        more = {"alignment.aligned": "finder", "drmas.alignment.target": "2"} if name == "mgrpo" else {}
        if name in GROUP_ESTIMATORS:
            more = {"drmas.group_by": "agent"}
        if name == "grpo_passk":  # verl's own rule
            with pytest.raises(DumpError, match="grpo_passk by agent refuses its rows or settings: Pass@k requires"):
                by(file, name, **more)
            continue
        assert by(file, name, **more).agents.keys() == {"main", *SUBS}


def test_a_report_for_people_and_one_for_programs(runs, tmp_path):
    file, _ = runs("grpo_team")
    wanted = ["--estimator", "grpo_team", "--estimator", "drmas", "--json", tmp_path / "out.json"]
    done = command(file.parent, "--step", STEP, *wanted)
    assert done.exit_code == 0 and done.stderr == ""
    assert "- **grpo_team**: the step's own: the same as trained (largest difference 0)" in done.stdout
    assert "- **drmas**: differs from the training by up to" in done.stdout
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3 * 3 and {len(cells) for cells in table} == {14}
    assert [cells[0].strip() for cells in table[2:]] == ["as trained"] * 3 + ["grpo_team"] * 3 + ["drmas"] * 3
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [(one["estimator"], one["own"], one["same"]) for one in written["replays"]] == [
        ("grpo_team", True, True),
        ("drmas", False, False),
    ]
    assert all(row["trained"] == row["replayed"][0] for row in written["rows"]) and len(written["rows"]) > 20
    assert any(row["trained"] != row["replayed"][1] for row in written["rows"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--step", 9], "step 9 was not dumped; there are 2"),
        (["--step", STEP, "--set", "ddof"], "--set ddof: give key=value"),
        (["--step", STEP, "--estimator", "gae"], "needs a critic"),
        (["--step", STEP, "--set", "drmas.alignment.mode=mask"], "--set drmas.alignment.mode: drmas doesn't read it"),
        (
            ["--step", STEP, "--estimator", "grpo", "--estimator", "rloo", "--set", "drmas.advantage.ddof=0"],
            "grpo, rloo doesn't read it; leave it out",
        ),
    ],
)
def test_a_wrong_command_says_why(arguments, says, runs):
    done = command(runs("drmas")[0].parent, *arguments)
    assert done.exit_code == 1 and "refused:" in done.stderr and says in done.stderr and done.stdout == ""
