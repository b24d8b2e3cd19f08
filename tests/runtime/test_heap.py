"""What the collector is spared."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_what_stays_is_not_collected_again() -> None:
    """With all that is loaded in the collector's eyes, a full collection stops speech for longer than a slot."""
    counted = """
        import gc
        from breeze_rtc.runtime.process import freeze_heap
        stays = [[] for _ in range(100_000)]
        freeze_heap()
        print(gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 1_000)
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(counted)], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "True"]
