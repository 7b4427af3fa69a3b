"""What the tests of the package share."""

import os
import pathlib

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]

try:
    import hypothesis
except ImportError:  # the tests that draw problems say so; those of a GPU need none
    pass
else:
    hypothesis.settings.register_profile("default", deadline=None, max_examples=40)
    hypothesis.settings.register_profile("more", deadline=None, max_examples=1000)
    hypothesis.settings.load_profile(os.environ.get("ANNULUS_HYPOTHESIS", "default"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
