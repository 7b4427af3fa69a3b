"""The command line tool as torchrun starts it: processes that meet without MPI. ANNULUS_TOOL names the tool."""

import os
import subprocess
import sys

import pytest

TOOL = os.environ.get("ANNULUS_TOOL")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]


@pytest.mark.skipif(not TOOL, reason="ANNULUS_TOOL names no tool")
def test_torchrun_starts_the_tool():
    command = [*TORCHRUN, "--standalone", TOOL, "verify", "--tokens", "403", "--layout", "zigzag", "--causal"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 ranks by TCP, launcher torchrun" in result.stdout
    assert result.stdout.count("passed: ") == 1
