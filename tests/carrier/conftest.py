"""Servers and tones are those of the server's tests, spoken sentences the agent's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent / name) for name in ("server", "transport", "agent")]
