"""The examples run. (tests/documents_test.py sees to it that the README shows the first of them.)"""

import os
import subprocess
import sys

from conftest import ROOT
from ranks_test import free_port

EXAMPLES = ROOT / "examples" / "python"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=EXAMPLES,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quick_start():
    assert "all finite: True" in run("quick_start.py")


def test_hugging_face_style():
    assert "largest difference" in run("hugging_face.py")


def test_training_over_ranks_learns():
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    printed = run(*launch, "--master-port", str(free_port()), "train.py", "--tokens", "503", "--steps", "31")
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.9 * losses[0], printed
