"""The Python listener lives with the transport's tests, spoken sentences with the agent's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent / name) for name in ("transport", "agent")]
