"""The examples run. (tests/documents_test.py sees to it that the README shows the first of them.)"""

import os
import subprocess
import sys

import pytest
import torch
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


def test_hugging_face_masks_and_causality(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from hugging_face import attention_function

    attend, module = attention_function([8], [1]), torch.nn.Module()
    module.is_causal = True
    x = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="takes no mask"):
        attend(module, x, x, x, attention_mask=torch.ones(1, 1, 8, 8))
    dense = torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    assert torch.allclose(attend(module, x, x, x, is_causal=False)[0], dense, atol=1e-6)
    assert not torch.allclose(attend(module, x, x, x)[0], dense, atol=1e-3)


def test_training_over_ranks_learns():
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    printed = run(*launch, "--master-port", str(free_port()), "train.py", "--tokens", "503", "--steps", "31")
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.9 * losses[0], printed
