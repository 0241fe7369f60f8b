"""Tiny models and data for the end-to-end tests; the checkout's `recipes` and this folder become importable."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from postgres import postgres_admin  # noqa: E402, F401


@pytest.fixture(scope="session")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> FileLock:
    """A lock for jobs that take more than a third of 24 GiB: no two of them run at once, whatever the processes."""
    root = tmp_path_factory.getbasetemp()
    return FileLock((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "heavy.lock")


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random tiny models `llama` (characters) and `chatml` (bytes, a chat template), and arithmetic prompts."""
    from recipes.cpu_arithmetic.tiny_model import build_tiny_model
    from verl_drmas.data.arithmetic import arithmetic_rows
    from verl_drmas.data.parquet import write_rows

    folder = tmp_path_factory.mktemp("assets")
    build_tiny_model(folder / "llama", style="llama", max_position_embeddings=256)
    build_tiny_model(folder / "chatml", style="chatml", max_position_embeddings=2048)
    train, held_out = arithmetic_rows(seed=0)
    write_rows(train, folder / "train.parquet")
    write_rows(held_out, folder / "val.parquet")
    return folder


@pytest.fixture
def arithmetic(assets: Path) -> list[str]:
    """Overrides that name model and data of the arithmetic job."""
    return [
        f"data.train_files={assets / 'train.parquet'}",
        f"data.val_files={assets / 'val.parquet'}",
        f"actor_rollout_ref.model.path={assets / 'llama'}",
    ]


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a short path: Ray's sockets live below it, and a socket's path has at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="d"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def parity_common(assets, tmp_path_factory) -> list[str]:
    """Overrides of a job of one agent and one call a session, for verl's own trainer and for ours."""
    loops = tmp_path_factory.mktemp("loops") / "loops.yaml"
    loops.write_text("- {name: one_call, _target_: loops.OneCall}\n")
    return [
        f"data.train_files={assets / 'train.parquet'}",
        f"data.val_files={assets / 'val.parquet'}",
        f"actor_rollout_ref.model.path={assets / 'llama'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=one_call",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ]


@pytest.fixture(scope="session")
def parity_team(parity_common):
    """That job under our trainer, three steps of two epochs; other jobs start from its checkpoint."""
    from launch import run

    folder = Path(tempfile.mkdtemp(prefix="p"))
    overrides = [*parity_common, "+drmas=rows", "algorithm.adv_estimator=grpo_team", "trainer.save_freq=3"]
    yield run(folder, overrides, steps=3)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def delegate_start():
    """Warm models of the delegating team; VERL_DRMAS_TEST_START names a folder that keeps them between runs."""
    from delegate_job import warm

    if kept := os.environ.get("VERL_DRMAS_TEST_START"):
        yield warm(Path(kept))
        return
    folder = Path(tempfile.mkdtemp(prefix="w"))
    yield warm(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def delegate_run(delegate_start):
    """The delegating team trained in one job, with a curriculum and dumps: what a pair is held against, too."""
    from delegate_job import CONFIG, STEPS, overrides, stages
    from launch import run

    folder = Path(tempfile.mkdtemp(prefix="g"))
    more = [f"trainer.rollout_data_dir={folder / 'dump'}", f"trainer.save_freq={STEPS}", stages(delegate_start)]
    yield run(folder, overrides(delegate_start, *more), steps=STEPS, timeout=480, defaults=CONFIG)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def postgres_url(postgres_admin: str):  # noqa: F811 - the fixture of this name in `postgres` is a function's
    """URL of a new PostgreSQL database, the module's own."""
    from postgres import fresh_database

    with fresh_database(postgres_admin) as url:
        yield url
