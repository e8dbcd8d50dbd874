"""Tests that need one NVIDIA GPU: `make gpu` runs them.  Anywhere else they are skipped, without loading torch if it is
not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def missing() -> str:
    """Why nothing here can run; empty = it can."""
    if importlib.util.find_spec("torch") is None:
        return "needs an NVIDIA GPU and torch with CUDA: torch is not installed"
    import torch

    if torch.version.hip or not torch.cuda.is_available():
        return "needs an NVIDIA GPU and torch with CUDA: torch.cuda.is_available() is False here"
    return ""


collect_ignore_glob = [] if importlib.util.find_spec("torch") is not None else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = missing() if ours else ""
    for item in ours:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
