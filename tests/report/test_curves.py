"""The figure: that it is drawn, with the panels that have data, and that its pixels follow the values."""

import pytest
from matplotlib import image

from verl_drmas.report import curves
from verl_drmas.report.curves import Line, Panel, draw, team_panels
from verl_drmas.report.runlog import read_run


def test_draws_a_png_with_one_panel_for_each_logged_quantity(write_log, team_entries, tmp_path):
    log = read_run(write_log(team_entries(success=(0.4, 0.9), solver=(0.4, 0.9), grad=(1, 2), seconds=(2, 2))))

    path = draw(log, tmp_path / "new" / "curves.png", columns=2)

    pixels = image.imread(path)
    assert pixels.shape[1] == pytest.approx(3.6 * 2 * 130, abs=2)  # four panels with data of the nine: two columns
    assert pixels.shape[0] == pytest.approx((2.7 * 2 + 0.5) * 130, abs=2)
    assert pixels[..., :3].min() < 0.5


def test_a_higher_value_is_drawn_higher(write_log, tmp_path):
    log = read_run(write_log([(step, {"a": 0.2, "b": 0.8}) for step in range(1, 11)]))
    blue, red = "#0000ff", "#ff0000"
    panel = Panel("t", "u", (Line("a", "low", blue), Line("b", "high", red)), share=True)
    pixels = image.imread(draw(log, tmp_path / "c.png", panels=[panel]))
    middle = pixels[:, pixels.shape[1] // 4 : pixels.shape[1] // 2]
    low = (middle[..., 2] > 0.9) & (middle[..., 0] < 0.1)
    high = (middle[..., 0] > 0.9) & (middle[..., 2] < 0.1)
    assert high.any() and low.any()
    assert high.nonzero()[0].mean() < low.nonzero()[0].mean()  # rows count from the top


def test_every_agent_has_its_own_reward_panel(write_log, team_entries):
    log = read_run(write_log(team_entries(solver=(0.4, 0.9), verifier=(0.5, 0.8))))
    assert [panel.title for panel in team_panels(log)][:2] == ["solver: reward", "verifier: reward"]


SEARCH = {"em": 0.4, "f1": 0.5, "gold_in_evidence": 0.6, "searches": 2.1}


def test_a_search_teams_answers_and_searches_have_a_panel_each(write_log):
    log = read_run(write_log([(step, {f"drmas/workflow/{n}": v for n, v in SEARCH.items()}) for step in (1, 2)]))
    panels = {panel.title: panel for panel in team_panels(log)}
    answers, searches = panels["Answers"], panels["Searches"]
    assert [(line.name, line.label) for line in answers.lines] == [
        ("drmas/workflow/em", "exact match"),
        ("drmas/workflow/f1", "token F1"),
        ("drmas/workflow/gold_in_evidence", "gold in the evidence"),
    ]
    assert [line.name for line in searches.lines] == ["drmas/workflow/searches"]
    assert answers.share and not searches.share  # a team may search more than once
    looks = {(line.colour, line.style) for line in answers.lines}
    assert len(looks) == len({line.style for line in answers.lines}) == 3  # told apart without colours too


@pytest.mark.parametrize(
    ("logged", "drawn"),
    [
        (tuple(SEARCH), ["Answers", "Searches"]),
        (("searches",), ["Searches"]),
        (("f1",), ["Answers"]),
        (("solver_success", "verifier_accuracy_right"), ["Solver success", "Verifier accuracy"]),
    ],
)
def test_only_what_was_logged_is_drawn(write_log, tmp_path, monkeypatch, logged, drawn):
    seen, real = [], curves._panel
    monkeypatch.setattr(curves, "_panel", lambda axis, panel, *a, **k: seen.append(panel) or real(axis, panel, *a, **k))
    log = read_run(write_log([(step, {f"drmas/workflow/{n}": 0.1 * step for n in logged}) for step in range(1, 4)]))
    pixels = image.imread(draw(log, tmp_path / "c.png"))
    assert [panel.title for panel in seen] == drawn
    assert pixels.shape[1] == pytest.approx(3.6 * len(drawn) * 130, abs=2)


def test_a_run_without_any_known_metric_is_refused(write_log, tmp_path):
    log = read_run(write_log([(1, {"something/else": 1.0})]))
    with pytest.raises(ValueError, match="something/else"):
        draw(log, tmp_path / "c.png")
