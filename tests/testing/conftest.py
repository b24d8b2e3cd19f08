"""The Python page lives with the server's tests, its listener with the transport's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent / name) for name in ("server", "transport")]
