"""The page in a real browser: it renders offline, shows names as names, and nothing in it runs."""

import re
import shutil
import subprocess

import pytest
from matplotlib import image
from simulated_runs import write_run

from verl_drmas.report.build import write_report

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian's package of that name)"),
]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
EVIL = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for seed in (1, 2):
        agents = {EVIL: "base", "verifier": "base"}
        write_run(folder / "runs" / f"a & b_seed{seed}", seed=seed, steps=12, agents=agents, config=False)
    return write_report([folder / "runs"], folder / "out", title=EVIL).html


def chromium(page, tmp_path, *options):
    command = ["chromium", *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


def test_nothing_runs_and_every_picture_is_there(page, tmp_path):
    dom = chromium(page, tmp_path, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]
    assert title.startswith("&lt;script&gt;")  # a script that ran would have set it to `ran`
    assert not re.search(r"<script|<img(?! src=\"data:)|onerror=(?!&quot;|\"document)", dom)
    assert dom.count('<img src="data:image/png;base64,') == page.read_text().count("<figure>") >= 6
    assert dom.count("<h2") == 8


def test_the_page_fits_its_window_and_is_not_blank(page, tmp_path):
    shot = tmp_path / "shot.png"
    chromium(page, tmp_path, "--window-size=1200,2400", f"--screenshot={shot}")
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2400, 1200)
    dark = pixels.mean(axis=2) < 0.5
    assert dark[:300].sum() > 2000  # the title
    assert dark.any(axis=1).mean() > 0.3
    assert not dark[:, -8:].any()  # nothing is cut at the right
