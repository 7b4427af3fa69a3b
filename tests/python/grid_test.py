"""The judge of grid.py on some problems of its grid, on the CPU: it lets the right results pass, and no others."""

import sys

import grid
import pytest

SOME = {"tokens": "127", "segments": "16,64,100", "heads": "12", "head_dim": "40", "dtype": "bf16"}


def faults(wanted, monkeypatch=None, **changes):
    """What the judge has to say of each problem with these values, computed as one with `changes`."""
    if changes:
        honest = grid.run
        monkeypatch.setattr(grid, "run", lambda problem, *rest: honest({**problem, **changes}, *rest))
    chosen = [x for x in grid.problems() if all(grid.says(x, key) == value for key, value in wanted.items())]
    assert chosen
    return [grid.check(problem, "cpu")[0] for problem in chosen]


@pytest.mark.parametrize("tokens", ["1", "127", "351"])
def test_right_results_pass(tokens):
    assert not any(faults({**SOME, "tokens": tokens}))


def test_blocks_that_see_nothing_of_each_other_are_judged_apart():
    few = {"segments": "16,64,100", "heads": "1", "head_dim": "8", "dtype": "fp32", "phase": "table"}
    assert not any(faults({**few, "tokens": "4099", "causal": "False"}))


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ({"gradient": "detached"}, {"gradient": "exact"}),
        ({"causal": "False"}, {"causal": True}),
        ({"phase": "by_head_block"}, {"phase": "by_head"}),
    ],
)
def test_results_of_another_problem_do_not(wanted, changes, monkeypatch):
    assert all(faults({**SOME, **wanted}, monkeypatch, **changes))


FEW = ["tokens=1", "segments=10", "heads=1", "head_dim=8", "dtype=fp32"]


def judged(jobs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grid.py", "--device", "cpu", "--jobs", str(jobs), *FEW])
    return grid.main(), capsys.readouterr().out


def test_processes_share_the_problems(capsys, monkeypatch):
    (alone, one), (together, two) = judged(1, capsys, monkeypatch), judged(2, capsys, monkeypatch)
    assert (alone, together) == (0, 0)
    assert one.splitlines()[-1] == two.splitlines()[-1]  # the same problems with the same numbers


def test_a_process_that_breaks_is_a_failure(capsys, monkeypatch):
    monkeypatch.setenv("ANNULUS_LIBRARY", "none")
    code, said = judged(2, capsys, monkeypatch)
    assert code == 1
    assert said.count("a process ended with code") == 2
    assert "failed: 0 of 0 problems" in said


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_element_is_found(name, monkeypatch):
    honest = grid.run

    def run(*args):
        result = honest(*args)
        result[name].view(-1)[77] += result[name].abs().max() / 16
        return result

    monkeypatch.setattr(grid, "run", run)
    assert all(faults({**SOME, "phase": "every"}))


@pytest.mark.parametrize(
    ("draws", "passes"),
    [
        ([("", 0.9)], True),
        ([("dk is off", 1.1), ("", 0.5), ("", 0.6)], True),
        ([("dk is off", 1.1), ("", 0.5), ("dk is off", 1.01)], False),
        ([("dk is off", 1.3)], False),
        ([("out differs from run to run", float("inf"))], False),
    ],
)
def test_what_is_just_above_its_bound_is_drawn_again(draws, passes, monkeypatch):
    left = list(draws)
    monkeypatch.setattr(grid, "check", lambda *_: left.pop(0))
    assert (grid.check_thoroughly(next(grid.problems()), "cpu")[0] == "") == passes
    assert not left
