"""`import verl` stays as quick as it was: the plugin runs in every Ray worker and every vLLM process."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process

LIMIT = 0.1  # seconds
PAIRS = 7

ALONE = """
import json, sys, time
import verl
before, start = set(sys.modules), time.process_time()
import verl_drmas.plugin
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def environment(plugins, platform=""):
    return {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins, "VERL_PLATFORM": platform}


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_the_plugin_alone_is_light(platform):
    """CPU time, so that a busy machine doesn't decide."""
    env = environment("none", platform)
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    assert seconds <= LIMIT
    assert "verl_drmas.plugin" in modules
    heavy = ("verl.trainer", "verl.experimental", "verl.workers", "vllm", "pydantic", "verl_drmas.trainer")
    assert [m for m in modules if m.startswith(heavy)] == []


def test_importing_verl_says_nothing_of_the_plugin():
    env = environment("auto", "cpu")
    bare = subprocess.run([sys.executable, "-c", "import verl"], env=env, capture_output=True, text=True, timeout=300)
    assert "drmas" not in bare.stdout + bare.stderr


@pytest.mark.benchmark
@pytest.mark.parametrize("platform", ["", "cpu"])
def test_import_verl_costs_no_more_with_the_plugin(platform):
    """Fresh processes in alternating pairs, medians. CPU time decides: wall time of a 5 s import varies by seconds."""

    def seconds(plugins):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        env = environment(plugins, platform if plugins == "auto" else "")
        subprocess.run([sys.executable, "-c", "import verl"], env=env, check=True, capture_output=True, timeout=300)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall

    seconds("auto")  # warm the disk cache
    runs = {"none": [], "auto": []}
    for i in range(PAIRS):
        for plugins in ("none", "auto") if i % 2 else ("auto", "none"):
            runs[plugins].append(seconds(plugins))
    cpu, wall = ({k: statistics.median(run[i] for run in v) for k, v in runs.items()} for i in (0, 1))
    print(f"\nimport verl, VERL_PLATFORM={platform or 'unset'}, without and with the plugin:")
    print(f"CPU {cpu['none']:.2f} s and {cpu['auto']:.2f} s, wall {wall['none']:.2f} s and {wall['auto']:.2f} s")
    assert cpu["auto"] - cpu["none"] <= LIMIT
