"""Two GPUs make the video of one: launched, compiled and replayed, with guidance on both or apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.two_gpus import CASES

pytestmark = pytest.mark.multi_gpu

TESTS = Path(__file__).parent.parent
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_two_gpus_make_the_video_of_one(dtype: str, tolerance: float) -> None:
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    # NVLink multicast stays off: it can take GPUs that others share out of service.
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, *LAUNCH, "--main_process_port", "0", str(TESTS / "gpu" / "two_gpus.py"), dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {result["case"] for result in results} == set(CASES) and len(results) == 2 * len(CASES) + 2
    for result in results:
        assert result["same"] and result["error"] <= tolerance, result
