"""Resume drill (`make drills`): a team on two models is killed with -9 again and again and goes on as if it were not.

One job runs through. A second one is killed at a random point, resumed from the disk as the kill left it, compared with
the first over its next steps, killed again, and so on: every resumed run is the next victim, so that an error of an
early resume shows in all later ones.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import Run, run, start

pytestmark = [pytest.mark.drill, pytest.mark.timeout(2400)]

STEPS = 12  # each of five kills and the last resume moves on by one or two steps
START, STEP = 420, 120  # seconds until the first step of a job, and for a step, on a busy machine
SEED = 20
JOB = (
    "+drmas=base",
    "+drmas.workflow.name=team_workflows:Duo",  # rewards with a spread for random weights, so that every step trains
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
    "data.max_prompt_length=64",
    "actor_rollout_ref.rollout.max_model_len=128",
)

# Wall times differ from run to run.
UNLIKE = re.compile(r"timing|seconds/|perf/|mfu")


def separate(assets: Path) -> list[str]:
    """The two agents on models of two families."""
    return [
        "+drmas.agents.writer.model=a",
        "+drmas.agents.editor.model=b",
        "+drmas.models.a={}",
        f"+drmas.models.b.actor_rollout_ref.model.path={assets / 'chatml'}",
    ]


def shared(assets: Path) -> list[str]:
    """Both agents on the one model `base`."""
    return ["+drmas.agents.writer.model=base", "+drmas.agents.editor.model=base"]


MAPPINGS = {"separate": (separate, ("a", "b")), "shared": (shared, ("base",))}


class Drill:
    """Jobs of one configuration, each in a folder of its own, all but the reference on the same checkpoints.

    Attributes:
        models: Ids of the models, in the order in which they are saved.
        checkpoints: The folder that every killed and resumed job shares.
        reference: Metrics by step of the uninterrupted job.
    """

    def __init__(self, folder: Path, overrides: list[str], models: tuple[str, ...]):
        self.folder, self.overrides, self.models = folder, overrides, models
        self.checkpoints = folder / "checkpoints"
        self.jobs = 0
        whole = run(folder / "whole", [*overrides, "trainer.max_actor_ckpt_to_keep=1"], steps=STEPS, timeout=900)
        self.reference = whole.steps
        for step, metrics in self.reference.items():  # a job that learns nothing resumes exactly whatever is lost
            assert all(metrics[f"drmas/model/{m}/grad_norm"] > 0 for m in models), step
        self.seconds = statistics.median(step["timing_s/step"] for step in self.reference.values())

    def start(self) -> Run:
        """Start a job on the shared checkpoints; it resumes by itself."""
        self.jobs += 1
        overrides = [*self.overrides, f"trainer.default_local_dir={self.checkpoints}"]
        return start(self.folder / str(self.jobs), overrides, steps=STEPS)

    def step_folder(self, step: int) -> Path:
        return self.checkpoints / f"global_step_{step}"

    def state(self) -> str:
        """What a kill left: the last step with a marker, and later folders without one."""
        found = {
            int(f.name.rsplit("_", 1)[1]): (f / "complete.json").exists()
            for f in self.checkpoints.iterdir()
            if f.is_dir()
        }
        return f"complete {max(s for s, ok in found.items() if ok)}, cut off {[s for s, ok in found.items() if not ok]}"

    def compare(self, steps: dict[int, dict], chosen: list[int]) -> tuple[int, float]:
        """Hold steps against the reference; returns how many values were compared and the largest difference.

        The tolerance is rounding: the engine batches calls as they arrive, and the order of a float32 sum over a batch
        depends on its shape. Requests carry seeds and rows are sorted before the update, so nothing else may differ. A
        lost optimiser state, data position or random state shows in the first digits of the loss or the rewards.
        """
        compared, largest = 0, 0.0
        for step in chosen:
            for name, value in self.reference[step].items():
                if UNLIKE.search(name) or not isinstance(value, int | float):
                    continue
                other = steps[step][name]
                assert math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6), (step, name, value, other)
                compared += 1
                largest = max(largest, abs(value - other))
        assert compared > 50 * len(chosen)
        return compared, largest


@pytest.fixture(scope="module", params=[os.environ.get("VERL_DRMAS_DRILL_MAPPING", "separate")])
def drill(request: pytest.FixtureRequest, assets: Path) -> Iterator[Drill]:
    """The drill takes a quarter of an hour a mapping; VERL_DRMAS_DRILL_MAPPING=shared runs it on the other one."""
    mapping, models = MAPPINGS[request.param]
    folder = Path(tempfile.mkdtemp(prefix="r"))
    overrides = [
        f"data.train_files={assets / 'train.parquet'}",
        f"data.val_files={assets / 'val.parquet'}",
        f"actor_rollout_ref.model.path={assets / 'llama'}",
        *JOB,
        *mapping(assets),
    ]
    yield Drill(folder, overrides, models)
    shutil.rmtree(folder, ignore_errors=True)


# -- where a kill is aimed: each waits for its moment in the step after `step`


def poll(job: Run, there: Callable[[], bool]) -> None:
    """Wait for something short-lived on the disk."""
    deadline = time.monotonic() + STEP
    while not there():
        assert time.monotonic() < deadline and job.process.poll() is None, job.log[-3000:]
        time.sleep(0.001)


def anywhere(drill: Drill, job: Run, step: int, draw: random.Random) -> None:
    """A random point of the step: rollout, log-probs, update, save or weight sync."""
    time.sleep(draw.uniform(0, drill.seconds))


def save_begins(drill: Drill, job: Run, step: int, draw: random.Random) -> None:
    """The first model's folder is there, and little or nothing in it."""
    poll(job, (drill.step_folder(step + 1) / "actor" / drill.models[0]).exists)


def between_models(drill: Drill, job: Run, step: int, draw: random.Random) -> None:
    """The last model's folder is there: the models before it are written."""
    poll(job, (drill.step_folder(step + 1) / "actor" / drill.models[-1]).exists)


def save_ends(drill: Drill, job: Run, step: int, draw: random.Random) -> None:
    """The marker is there, the tracker perhaps not."""
    poll(job, (drill.step_folder(step + 1) / "complete.json").exists)


AIMS = (anywhere, save_begins, anywhere, between_models, save_ends)


def resumed_from(job: Run) -> int:
    """The step that the job's log says it resumed from."""
    return int(job.wait_for(r"verl-drmas: resuming from \S*/global_step_(\d+)", START).group(1))


def test_five_kills_change_nothing(drill):
    draw = random.Random(SEED)
    job = drill.start()
    try:
        job.wait_for_step(1, START)
        print(f"\n{'kill':>4}  {'aimed at':<14}{'during step':>11}  {'left on disk':<32}{'resumed':>7}  compared")
        for kill, aim in enumerate(AIMS, start=1):
            step = max(job.steps)
            aim(drill, job, step, draw)
            seen = max(job.steps)  # steps whose metrics came, and which are therefore saved
            job.kill()
            left = drill.state()
            job = drill.start()
            origin = resumed_from(job)
            # Nothing finished is lost, and at most the step that was running is kept.
            assert seen <= origin <= seen + 1
            job.wait_for_step(origin + 1, START)
            steps = job.steps
            assert min(steps) == origin + 1
            compared, largest = drill.compare(steps, [origin + 1])
            cut = [int(s) for s in re.findall(r"passing over checkpoint \S*global_step_(\d+): it has no", job.log)]
            assert f"cut off {cut}" in left
            print(
                f"{kill:>4}  {aim.__name__:<14}{step + 1:>11}  {left:<32}{origin:>7}  "
                f"step {origin + 1}: {compared} values, largest difference {largest:.1e}"
            )
        job.wait_for_step(origin + 2, STEP)
        drill.compare(job.steps, [origin + 2])
    finally:
        job.kill()


def test_damaged_checkpoints_are_passed_over_with_a_reason(drill):
    whole = sorted(
        int(folder.parent.name.rsplit("_", 1)[1]) for folder in drill.checkpoints.glob("global_step_*/complete.json")
    )
    good, unmarked, torn = whole[-3:]
    (drill.step_folder(unmarked) / "complete.json").unlink()
    shard = next((drill.step_folder(torn) / "actor" / drill.models[-1]).glob("model_world_size_*.pt"))
    shard.unlink()
    for later in drill.checkpoints.glob("global_step_*"):
        if int(later.name.rsplit("_", 1)[1]) > torn:
            shutil.rmtree(later)
    (drill.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(torn))
    job = drill.start()
    try:
        assert resumed_from(job) == good
        assert f"global_step_{unmarked}: it has no complete.json" in job.log
        assert f"global_step_{torn}: actor/{drill.models[-1]}/{shard.name} is missing" in job.log
        job.wait_for_step(good + 1, START)
        compared, largest = drill.compare(job.steps, [good + 1])
        print(
            f"\npassed over {unmarked} and {torn}, resumed {good}: {compared} values, largest difference {largest:.1e}"
        )
    finally:
        job.kill()
