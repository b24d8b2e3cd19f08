"""A recogniser behind an OpenAI-compatible endpoint.

Any server that offers `POST {base_url}/audio/transcriptions` will do: a hosted one, faster-whisper-server, vLLM,
whisper.cpp's.
"""

from __future__ import annotations

import io
import os
import wave
from typing import Any

import httpx
import numpy as np

from breeze_rtc.agent.listen import SAMPLE_RATE, Listener, ListenFailed, Recogniser, Samples
from breeze_rtc.errors import BadRequest


class TranscriptionEndpoint:
    """Sends a turn as a WAV file and takes the text that comes back; a `Recogniser`.

    base_url: such as "http://127.0.0.1:8000/v1".  language: a code such as "de"; None: the server finds out.
    api_key_env: the environment variable that holds the key; an unset one means that no key is sent.
    """

    def __init__(
        self,
        base_url: str,
        model: str = "whisper-1",
        *,
        language: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout_s: float = 10.0,
    ) -> None:
        key = os.environ.get(api_key_env, "")
        self._url = base_url.rstrip("/") + "/audio/transcriptions"
        self._fields = {"model": model, "response_format": "json"} | ({"language": language} if language else {})
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=httpx.Timeout(timeout_s, connect=5.0)
        )

    async def transcribe(self, samples: Samples) -> str:
        """16 kHz mono float32 -> its words; raises ListenFailed."""
        try:
            answer = await self._client.post(
                self._url, data=self._fields, files={"file": ("turn.wav", wav(samples), "audio/wav")}
            )
            if answer.status_code != 200:
                raise ListenFailed(f"{self._url} answered {answer.status_code}: {answer.text[:300]}")
            text: Any = answer.json().get("text")
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            raise ListenFailed(f"{self._url}: {error or type(error).__name__}") from error
        if not isinstance(text, str):
            raise ListenFailed(f"{self._url} answered without a text")
        return text.strip()

    async def warm(self) -> None:
        """Nothing: a request that holds no speech would cost like one that does."""

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self._client.aclose()


def wav(samples: Samples) -> bytes:
    """16 kHz mono float32 -> a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes((np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes())
    return file.getvalue()


def recogniser(
    name: str = "moonshine",
    *,
    model: str = "whisper-1",
    language: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
) -> Recogniser:
    """The recogniser of a name: "moonshine", "whisper:MODEL" (a folder, or a name of faster-whisper's), or the address
    of an endpoint, which is asked for `model`.  Raises what `Listener` does."""
    if name.startswith(("http://", "https://")):
        return TranscriptionEndpoint(name, model, language=language, api_key_env=api_key_env)
    kind, _, whisper = name.partition(":")
    if kind == "whisper" and whisper:
        return Listener(whisper=whisper, language=language)
    if name != "moonshine":
        raise BadRequest(f"there is no recogniser {name!r}: moonshine, whisper:MODEL, or an address")
    return Listener(language=language)
