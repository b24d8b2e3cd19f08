"""Some of these tests drive an executor as those of `runtime` do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "runtime"))
