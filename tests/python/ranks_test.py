"""Sequences over several ranks, gloo on the CPU: jobs of ranks_worker.py."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

WORKER = str(pathlib.Path(__file__).with_name("ranks_worker.py"))
LIMIT_SECONDS = 300
CASES_OF_TROUBLE = ["disagreement", "other_calls", "bad_argument", "bad_tensors", "no_memory", "uneven_rows"]
CASES_OF_TROUBLE += ["callback_exception", "stopped", "killed"]

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no torch.distributed with gloo"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_give_what_one_rank_gives(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), WORKER, "all_right"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: all right" in done.stdout
    print(next(line for line in done.stdout.splitlines() if line.startswith("two_layer_model")))


def test_trouble_is_an_error_on_every_rank_and_never_a_hang():
    """Without torchrun, which ends the other ranks itself as soon as one is killed."""
    ranks, port = 3, free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, WORKER, "all_wrong"],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [job.communicate(timeout=LIMIT_SECONDS) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for rank, (job, (out, errors)) in enumerate(zip(jobs, outputs, strict=True)):
        print(out)
        assert job.returncode == (-9 if rank == ranks - 1 else 0), f"rank {rank}:\n{out}\n{errors}"
        for case in CASES_OF_TROUBLE:
            assert f"rank {rank}: done with {case}" in out
