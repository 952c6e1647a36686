"""What every test runs under: no model hub, no shared cache, one thread a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before anything imports torch or huggingface_hub, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "huggingface")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; threads would only compete


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where torch sees no CUDA device: the one reason to skip that this suite has."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
