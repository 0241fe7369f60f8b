"""Wrong input through verl's own command: one line, a non-zero exit, and no Ray.

Each start costs verl's import, so only one refusal of each way through is run here; `test_check.py` has the rest.
"""

import os
import subprocess
import sys

import pytest

from verl_drmas.data.parquet import prompt_row, write_rows

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    row = prompt_row("1+1", "2", data_source="sums", split="train", index=0)
    data = write_rows([row], folder / "rows.parquet")
    (folder / "config.json").write_text("{}")
    return [f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={folder}"]


def main_ppo(folder, *arguments):
    """Starts verl's command in an empty folder."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    env = {**os.environ, "VERL_PLATFORM": "cpu"}
    env.pop("RAY_ADDRESS", None)
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


CASES = {
    "unknown key": (
        ["+drmas=solver_verifier", "+drmas_runtime=cpu", "+drmas.agents.solver.penalty=1"],
        "verl-drmas: drmas.agents.solver.penalty: unknown key; did you mean 'invalid_penalty'?",
    ),
    "drmas under sync": (
        ["+drmas=solver_verifier", "+drmas_runtime=cpu", "trainer.v1.trainer_mode=sync"],
        "verl-drmas: trainer.v1.trainer_mode is 'sync', but a drmas section needs agent ids: set "
        "trainer.v1.trainer_mode=drmas_sync",
    ),
}


def test_wrong_input_ends_before_ray_with_one_line(tmp_path, files):
    started = {}
    try:
        for name, (arguments, _) in CASES.items():
            folder = tmp_path / name.replace(" ", "_")
            folder.mkdir()
            started[name] = main_ppo(folder, *files, *arguments)  # both at once
        for name, process in started.items():
            out, err = process.communicate(timeout=240)
            assert process.returncode == 1, err
            assert [line for line in err.splitlines() if line.startswith("verl-drmas:")] == [CASES[name][1]]
            assert "Traceback" not in err
            for trace in ("Started a local Ray instance", "ray init kwargs"):
                assert trace not in out + err
    finally:
        for process in started.values():
            process.kill()
            process.wait()
