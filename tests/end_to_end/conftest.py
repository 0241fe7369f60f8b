"""Tiny models and data for the end-to-end tests; the checkout's `recipes` and this folder become importable."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from postgres import postgres_admin  # noqa: E402, F401


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
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="d"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def delegate_start():
    """Warm models of the delegating team; VERL_DRMAS_TEST_START names a folder that keeps them between runs."""
    import shutil
    import tempfile

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
    import shutil
    import tempfile

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
