"""The script for GPU hosts, as far as it goes without one."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU: run benchmarks/gpu.sh")
def test_without_a_gpu_it_says_so_and_makes_nothing():
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr
    assert not (SCRIPT.parents[1] / ".venv-gpu").exists()
