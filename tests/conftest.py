from __future__ import annotations

import os

import pytest

# Before anything imports torch: models this small are slower on two threads, and tests run beside each other.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines keep their step times where these tests begin and end, in this process and in others."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
