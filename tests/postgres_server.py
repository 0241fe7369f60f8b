"""A PostgreSQL server of one's own from Debian's package, on loopback. Standard library only: CI starts it first.

python tests/postgres_server.py start FOLDER    prints the URL of an administrator
python tests/postgres_server.py stop FOLDER
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Power losses are not what is tested; a killed server loses nothing without fsync. The suite needs few buffers.
SETTINGS = {"listen_addresses": "127.0.0.1", "fsync": "off", "shared_buffers": "64MB", "max_connections": "100"}
SECONDS = 90


def programs() -> Path | None:
    """Folder of the newest installed server's programs."""
    found = [Path(path).parent for path in glob.glob("/usr/lib/postgresql/*/bin/initdb")]
    found += [Path(path).parent for path in [shutil.which("initdb")] if path]
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], default=None)


def why_not() -> str | None:
    """Why no server can be started here; None if one can."""
    if programs() is None:
        return "no PostgreSQL server is installed (apt-get install postgresql)"
    if os.getuid() == 0 and shutil.which("runuser") is None:
        return "PostgreSQL refuses to run as root, and there is no runuser"
    return None


class Server:
    """One server in a folder of its own.

    Attributes:
        folder: Holds the data, the socket, the log and the password.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.note = self.folder / "server.json"

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the administrator, for the database `postgres`."""
        note = json.loads(self.note.read_text())
        return f"postgresql+psycopg://postgres:{note['password']}@127.0.0.1:{note['port']}/postgres"

    def create(self) -> Server:
        """Make the data, with a random password and a port that is free now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        password = secrets.token_urlsafe(12)
        secret = self.folder / "password"
        secret.write_text(password)
        self.note.write_text(json.dumps({"port": port, "password": password}))
        if os.getuid() == 0:
            for path in (self.folder, secret):
                shutil.chown(path, "postgres", "postgres")
        login = ["--username=postgres", f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        self._run("initdb", f"--pgdata={self.folder / 'data'}", "--no-sync", *login)
        return self

    def start(self, settings: dict[str, str] = SETTINGS) -> Server:
        """Start it, also after it was killed, and wait until it answers."""
        port = json.loads(self.note.read_text())["port"]
        settings = settings | {"port": port, "unix_socket_directories": str(self.folder)}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        log = self.folder / "server.log"
        self._control("start", "-w", "-t", str(SECONDS), "-l", str(log), "-o", options)
        return self

    def stop(self) -> None:
        """End it and every connection."""
        self._control("stop", "-m", "immediate", check=False)

    def kill(self) -> None:
        """kill -9 of the server; its other processes end when they notice."""
        leader = int((self.folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        os.kill(leader, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        # The leader's entry too: until it is reaped, the next server takes it for alive.
        while left := [*self._processes(), *[leader] * Path(f"/proc/{leader}").exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {left} of the killed server {leader} are still there")
            time.sleep(0.05)

    def _processes(self) -> list[int]:
        """The server's processes: each works in the folder of the data, and has a session of its own."""
        data, found = str((self.folder / "data").resolve()), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone, a zombie, or somebody else's
                if os.readlink(entry / "cwd") == data:
                    found.append(int(entry.name))
        return found

    def _control(self, *arguments: str, check: bool = True) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), *arguments, check=check)

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        where = programs()
        assert where is not None, why_not()
        command = [str(where / program), *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        # The server inherits these: with a pipe, one would wait for its end.
        with (self.folder / "programs.log").open("ab") as log:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", timeout=2 * SECONDS, check=False
            )
        if check and done.returncode:
            logs = [path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log"))]
            raise RuntimeError(f"{program} ended with {done.returncode}:\n" + "\n".join(logs))


def main() -> None:
    command, folder = sys.argv[1:]
    if command == "start":
        if reason := why_not():
            sys.exit(reason)
        print(Server(Path(folder)).create().start().url)
    elif command == "stop":
        Server(Path(folder)).stop()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
