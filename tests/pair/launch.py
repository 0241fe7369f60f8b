"""Runs the launcher over fake jobs: `python launch.py SPEC`, a JSON object (see `main`); exits with its status."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_drmas.pair.jobs import Job
from verl_drmas.pair.launcher import Launcher
from verl_drmas.pair.logs import JointLog

FAKE = Path(__file__).with_name("fake_job.py")


@dataclass(frozen=True)
class FakeJob(Job):
    """A job whose starts follow a plan each; the last plan stands for all further ones."""

    plans: tuple = ()

    def command(self, place):
        starts = self.folder / "starts"
        number = len(starts.read_text()) if starts.exists() else 0
        self.folder.mkdir(parents=True, exist_ok=True)
        starts.write_text("x" * (number + 1))
        return [sys.executable, str(FAKE), *self.plans[min(number, len(self.plans) - 1)]]


def main(spec):
    folder, token = Path(spec["folder"]), "s3cr3t-t0k3n"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        FakeJob(name, folder / name, (), env={"DRMAS_GATEWAY_TOKEN": token}, plans=tuple(map(tuple, plans)))
        for name, plans in spec["jobs"].items()
    ]
    log = JointLog(folder, list(spec["jobs"]), [token], sys.stdout)
    options = {key: spec[key] for key in ("restarts", "grace") if key in spec}
    return Launcher(jobs, folder, log, pause=0.2, settle=0.3, **options).run()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
