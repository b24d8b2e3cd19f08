"""What every JSON file of these scripts begins with: where its values come from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def origin(*packages: str, **others: str) -> dict[str, Any]:
    """Machine, versions of some packages and of `others`, commit, and the arguments of this run."""
    return {
        "machine": machine(),
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages} | others,
        "commit": commit(),
        "arguments": sys.argv[1:],
    }


def machine() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return ", ".join([*(names or [platform.processor()])[:1], platform.machine(), platform.system()])


def commit() -> str:
    """With "-dirty" where something was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
