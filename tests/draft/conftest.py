"""Tiny models gain nothing from a second thread, and lose much beside another busy process."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_threads):
    torch.set_num_threads(1)
