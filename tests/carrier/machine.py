"""What a busy machine does to programs that share it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def waited_ns(*pids: int) -> int:
    """How long threads of these processes have waited for a core that they could have used, together, since they began
    (`schedstat`: Documentation/scheduler/sched-stats.rst of Linux)."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # It has ended.
                total += int((task / "schedstat").read_text().split()[1])
    return total


def hurry(task: int) -> None:
    """Let a thread, and what it starts, go before others, where that is allowed: a telephone shares its machine with
    nobody."""
    with suppress(PermissionError):
        os.sched_setscheduler(task, os.SCHED_FIFO, os.sched_param(1))
