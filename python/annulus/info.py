"""``python -m annulus.info``: what is installed and what it can do here; the first thing to put into a bug report."""

from __future__ import annotations

import platform
import sys

import torch
import torch.distributed as dist

import annulus
from annulus import _library as c


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        annulus.plan(64, 2, 64, [64], [1], dtype=torch.bfloat16, device="cuda")
    except (RuntimeError, ValueError) as error:
        return f"{torch.cuda.get_device_name()}; {error}"
    return torch.cuda.get_device_name()


def _works() -> str:
    q = torch.randn(1, 37, 2, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(annulus.dilated_attention(q, q, q, [8, 37], [1, 3]).sum(), q)
    return "forward and backward on the CPU give finite numbers" if gradient.isfinite().all() else "NO: not finite"


def _ranks() -> str:
    if not dist.is_available() or not dist.is_gloo_available():
        return "no gloo in this torch"
    return "gloo, NCCL" if dist.is_nccl_available() else "gloo"


def report() -> str:
    lines = {
        "annulus": f"{annulus.__version__}, {c.library()._name}",
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "works": _works(),
        "gpu": _cuda(),
        "ranks": _ranks(),
    }
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())


if __name__ == "__main__":
    print(report())
