"""Pictures of groups: every run is named, beside the axes and never over them, and what was logged is what is drawn."""

import numpy as np
import pytest
from matplotlib import image
from simulated_runs import SEPARATE

from verl_drmas.report import figures
from verl_drmas.report.blocks import Picture
from verl_drmas.report.figures import AT_ONCE, Panel, batches, draw_curves, draw_phases, metric_of_runs
from verl_drmas.report.find import find_runs
from verl_drmas.report.groups import Group, group_runs
from verl_drmas.report.sections.curves import curve_blocks
from verl_drmas.report.spikes import spikes


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be saved, by file name; rendering takes most of the time, and `test_report.py` has it."""
    kept = {}
    monkeypatch.setattr(figures, "_save", lambda figure, path: kept.update({path.name: figure}))
    return kept


@pytest.fixture
def groups(runs):
    own = {
        f"{estimator}_seed{seed}": dict(
            seed=seed * 100 + len(estimator), steps=30, spikes=(20,), config={"estimator": estimator, "seed": seed}
        )
        for estimator in ("drmas", "grpo_team", "grpo_activation")
        for seed in (1, 2, 3)
    }
    return group_runs(runs(**own))


def everything(groups, folder):
    found = {run.name: spikes(run.log) for group in groups for run in group.runs}
    return curve_blocks(groups, found, folder)


def test_every_run_is_named_below_the_axes(groups, drawn, tmp_path):
    everything(groups, tmp_path)
    names = [f"{label} {run.name}" for group in groups for label, run in group.labelled()]
    assert {"reward.png", "inflation.png", "activations.png", "grad_norm.png", "entropy.png"} <= set(drawn)
    for figure in drawn.values():
        (legend,) = figure.legends
        labels = [text.get_text() for text in legend.get_texts()]
        assert set(names) <= set(labels)
        figure.draw_without_rendering()
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width + 1 and box.y0 >= 0
        for axis in figure.axes:
            if axis.axison:
                assert box.y1 <= axis.get_tightbbox().y0 + 1


def test_the_thick_line_is_the_mean_of_the_thin_ones(groups, drawn, tmp_path):
    metric = "drmas/agent/solver/reward/mean"
    draw_curves("t", [Panel("solver", metric_of_runs(groups, metric))], groups, tmp_path / "x.png")
    (axis,) = drawn["x.png"].axes
    thick = [line for line in axis.lines if line.get_linewidth() > 2]
    assert len(axis.lines) == 12 and len(thick) == 3
    for line, group in zip(thick, groups, strict=True):
        each = [run.log.series(metric)[1] for run in group.runs]
        assert line.get_ydata() == pytest.approx(np.mean(each, axis=0))


def test_spikes_are_marked_where_they_are_and_the_axis_is_logarithmic(groups, drawn, tmp_path):
    everything(groups, tmp_path)
    (axis,) = drawn["grad_norm.png"].axes
    marks = [line for line in axis.lines if line.get_marker() == "v"]
    assert [line.get_xdata().tolist() for line in marks] == [[20]] * 9
    assert axis.get_yscale() == "log"
    drawn["grad_norm.png"].draw_without_rendering()
    assert not [label.get_text() for label in axis.get_yticklabels() if "$" in label.get_text()]


def test_one_run_is_one_line_without_a_mean(groups, drawn, tmp_path):
    alone = [Group("A", "t", groups[0].runs[:1])]
    draw_curves("t", [Panel("x", metric_of_runs(alone, "drmas/workflow/solver_success"))], alone, tmp_path / "x.png")
    (axis,) = drawn["x.png"].axes
    assert len(axis.lines) == 1
    assert [text.get_text() for text in drawn["x.png"].legends[0].get_texts()] == ["A1 drmas_seed1"]


def test_agents_of_one_quantity_share_a_scale_and_models_have_a_panel_each(runs, drawn, tmp_path):
    groups = group_runs(runs(a=dict(steps=12), b=dict(steps=12, seed=2, agents=SEPARATE)))
    everything(groups, tmp_path)
    limits = {axis.get_ylim() for axis in drawn["inflation.png"].axes}
    assert len(limits) == 1
    assert [axis.get_title(loc="left") for axis in drawn["entropy.png"].axes if axis.axison] == [
        "solver",
        "verifier",
        "base (solver, verifier)",
    ]


def test_names_with_dollars_and_underscores_are_no_formulas(runs, drawn, tmp_path):
    groups = group_runs(runs(**{"_a$x^2$_seed1": dict(steps=8, agents={"$\\bad{": "m"}, config=False)}))
    everything(groups, tmp_path)
    assert "A1 _a$x^2$_seed1" in [text.get_text() for text in drawn["reward.png"].legends[0].get_texts()]
    assert drawn["reward.png"].axes[0].get_title(loc="left") == "$\\bad{"


def test_more_groups_than_colours_go_into_further_pictures(write_log, drawn, tmp_path):
    ((run,), _) = find_runs([write_log([(step, {"drmas/agent/a/reward/mean": step / 9}) for step in range(1, 9)])])
    many = [Group(chr(65 + i), f"t{i}", (run.named(f"run{i}"),)) for i in range(AT_ONCE + 2)]
    assert [len(part) for part in batches(many)] == [AT_ONCE, 2]
    everything(many, tmp_path)
    assert set(drawn) == {"reward-1.png", "reward-2.png"}
    colours = [line.get_color() for line in drawn["reward-1.png"].axes[0].lines]
    assert len(set(colours)) == AT_ONCE


def test_a_metric_that_appears_later_is_drawn_from_there(write_log, drawn, tmp_path):
    name = "drmas/model/base/entropy"
    runs, _ = find_runs([write_log([(step, {name: 0.5} if step > 12 else {"x": 1.0}) for step in range(1, 21)])])
    everything(group_runs(runs), tmp_path)
    assert drawn["entropy.png"].axes[0].lines[0].get_xdata()[0] == 13


def test_a_long_runs_lines_are_smoothed_and_it_is_said(write_log, drawn, tmp_path):
    name = "drmas/agent/a/reward/mean"
    runs, _ = find_runs([write_log([(step, {name: step % 2}) for step in range(1, 201)])])
    (picture,) = [block for block in everything(group_runs(runs), tmp_path) if isinstance(block, Picture)]
    assert "each value the mean of the last 5 steps" in picture.caption
    assert drawn["reward.png"].axes[0].lines[0].get_ydata()[-1] == pytest.approx(0.4)


def test_phases_are_bars_as_long_as_their_seconds(drawn, tmp_path):
    seconds = {"A: x": {"rollout": 3.0, "update": 1.0, "other": 0.5}, "B: y": {"rollout": 1.0, "test": 2.0}}
    draw_phases(seconds, tmp_path / "phases.png")
    (axis,) = drawn["phases.png"].axes
    assert sorted(patch.get_width() for patch in axis.patches if patch.get_width()) == [0.5, 1.0, 1.0, 2.0, 3.0]


def test_a_figure_is_saved_as_wide_as_a_page(tmp_path):
    draw_phases({"A: x": {"rollout": 3.0}}, tmp_path / "phases.png")
    assert image.imread(tmp_path / "phases.png").shape[1] == 1300
