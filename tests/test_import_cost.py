"""`import verl` stays as quick as it was: the plugin runs in every Ray worker and every vLLM process."""

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

LIMIT = 0.1  # seconds

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
    """Wall time in fresh processes, pairs in turn, medians."""

    def seconds(plugins):
        start = time.perf_counter()
        env = environment(plugins, platform if plugins == "auto" else "")
        subprocess.run([sys.executable, "-c", "import verl"], env=env, check=True, capture_output=True, timeout=300)
        return time.perf_counter() - start

    seconds("auto"), seconds("none")  # warm the disk cache
    pairs = [
        (seconds("none"), seconds("auto")) if i % 2 else (seconds("auto"), seconds("none"))[::-1] for i in range(5)
    ]
    without, with_plugin = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"\nimport verl: {without:.2f} s without the plugin, {with_plugin:.2f} s with it (platform {platform or 'any'})"
    )
    assert with_plugin - without <= LIMIT
