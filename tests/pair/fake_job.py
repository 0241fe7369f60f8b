"""A job as the launcher sees one: speaks, may start a "cluster" of daemons, then ends as it is told to.

`python fake_job.py PLAN`: words of PLAN, one after the other:
say:TEXT | ray (makes the session folder that Ray makes) | daemons (processes of all kinds that outlive it) |
stubborn (ignores SIGTERM) | until:FILE (waits for it) | sleep | token (says it) | exit:N | kill:N (signal to itself)
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
# Starts another and ends, so that nobody is the other's parent.
ORPHAN = [sys.executable, "-c", f"import subprocess; subprocess.Popen({STUBBORN!r}, start_new_session=True)"]


def daemons():
    """A child, one with a session of its own, an orphan that ignores SIGTERM, and children of children."""
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    subprocess.Popen(ORPHAN).wait()
    subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({STUBBORN!r})"])


def main(plan):
    place = Path("/tmp") / os.environ["DRMAS_JOB"]
    for step in plan:
        word, _, value = step.partition(":")
        if word == "say":
            print(value, flush=True)
        elif word == "ray":
            (place / "session_1").mkdir(parents=True)
        elif word == "daemons":
            daemons()
        elif word == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word == "until":
            while not Path(value).exists():
                time.sleep(0.05)
        elif word == "sleep":
            time.sleep(600)
        elif word == "token":
            print(f"my token is {os.environ['DRMAS_GATEWAY_TOKEN']} and that is all", flush=True)
        elif word == "exit":
            sys.exit(int(value))
        elif word == "kill":
            os.kill(os.getpid(), int(value))
        else:
            raise ValueError(step)


if __name__ == "__main__":
    main(sys.argv[1:])
