"""Python page, listener and spoken sentences live with the tests of the server, the transport and the agent."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent / name) for name in ("agent", "server", "transport")]
