"""Is it the user, or the agent's own voice out of the loudspeaker and back into the microphone?

We know what plays at the ear now: the sound was made here, and the listener's position says how far it has come.  So
before the voice activity is believed, the microphone's energy in a few bands is laid beside that of our own sound, some
time earlier.  Where one follows the other, the microphone hears us; what then stands out of the echo by `_MARGIN_DB` is
the user.  Energies, not waveforms: they survive two codecs, a room, a browser's echo canceller that lets a little
through, and a jitter buffer that stretches time.

Pure numpy and no clock.  Only frames in which both sides sound cost anything to speak of.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from breeze_rtc.agent.vad import FRAME_SAMPLES, SAMPLE_RATE, Samples

HOP_S = FRAME_SAMPLES / SAMPLE_RATE / 2
"""16 ms: half a frame of the microphone."""
_EDGES_HZ = np.geomspace(250, 3_600, 11)  # what a telephone carries
_BANDS = len(_EDGES_HZ) - 1
_LAGS = 62  # from the ear through room, network and jitter buffer back to here: up to a second
_WINDOW = 64  # hops that are laid beside each other: a second
_MEMORY = _WINDOW + _LAGS
_FLOOR = 1e-9  # -90 dB
_AUDIBLE = 1e-6  # -60 dB, in a band of our own sound
# Measured with speech through two codecs: 99 of 100 looks at an echo of -20 dB are alike by 0.72 and more, of -10 dB by
# 0.81, of -30 dB by 0.44; 99 of 100 at a user who speaks at the same time by less than 0.68, once 640 ms of our own
# sound lie beside.  Where both have only begun, anybody is alike; but what is faint is hardly ever a user.
_LOCK, _LOCK_SOON, _LOCK_FAINT = 0.7, 0.78, 0.55
_KEEP, _KEEP_FAINT = 0.4, 0.25  # below that it no longer is our echo, or there is much else
_LONG, _SHORT, _SHORTEST = 40, 24, 8  # hops
_QUIET_DB, _FAINT_DB = -10.0, -20.0
_MARGIN_DB = 6.0
_USER_SHARE = 0.5  # of a frame's energy that no echo explains
_GAIN_HOPS = 180
_FOLLOW_EVERY = 4  # a delay that is known changes slowly
_TAIL = 0.5  # what a room keeps of our sound from one hop to the next


class _Bands:
    """Sound of one rate -> energies of its bands, a row each 16 ms."""

    def __init__(self, rate: int) -> None:
        self._hop = round(rate * HOP_S)
        self._window = np.hanning(2 * self._hop).astype(np.float32)
        at = np.fft.rfftfreq(2 * self._hop, 1 / rate)
        self._first = np.searchsorted(at, _EDGES_HZ)
        self._scale = np.float32(1 / (self._hop * np.square(self._window).sum()))
        self._rest = np.zeros(self._hop, np.float32)

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows that `samples` complete; row k is centred on sample `k * hop`."""
        sound = np.concatenate((self._rest, samples))
        rows = len(sound) // self._hop - 1
        self._rest = sound[rows * self._hop :]
        if rows <= 0:
            return np.zeros((0, _BANDS), np.float32)
        framed = sliding_window_view(sound[: (rows + 1) * self._hop], 2 * self._hop)[:: self._hop]
        power = np.square(np.abs(np.fft.rfft(framed * self._window)))
        bands: NDArray[np.float32] = np.add.reduceat(power, self._first, axis=1)[:, :_BANDS].astype(np.float32)
        return bands * self._scale


class _Spoken:
    """The band energies of one stream, by media position."""

    def __init__(self, rate: int) -> None:
        self.bands = _Bands(rate)
        self.rows: deque[NDArray[np.float32]] = deque()
        # Media position of rows[0], in hops.
        self.first = 0
        # Where the ear was when it was last asked, and when; None before.
        self.heard_hops = 0.0


class EchoGuard:
    """One call's.  `made` and `plays` say what is at the ear, `judge` what to think of the microphone."""

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._hop = round(sample_rate * HOP_S)
        self._streams: dict[int, _Spoken] = {}
        # The last rows at the ear and at the microphone, by time; their ends are `_at`, in hops of the caller's clock.
        self._ear = np.full((_MEMORY, _BANDS), 0.0, np.float32)
        self._microphone = np.full((_WINDOW, _BANDS), 0.0, np.float32)
        self._ear_at: int | None = None
        self._heard = _Bands(SAMPLE_RATE)
        # Frames that nobody has had to look at yet.
        self._unseen: deque[Samples] = deque(maxlen=_WINDOW // 2 + 1)
        self._looks = 0
        # Frames of the microphone come unevenly, their sound does not: when the first would have come at the earliest.
        self._frames = 0
        self._began_s: float | None = None
        # The echo's delay in hops, None while none is known, and how loud each band comes back.
        self.lag: int | None = None
        # Both sides have just begun, alike and the microphone faintly: too short to know, so the frame does not count.
        self._is_suspect = False
        self._gains: deque[NDArray[np.float32]] = deque(maxlen=_GAIN_HOPS)
        self._gain: NDArray[np.float32] | None = None

    # -- our own sound

    def made(self, stream: int, pcm: bytes) -> None:
        """The next sound of `stream`, s16le mono."""
        if pcm:
            spoken = self._streams.setdefault(stream, _Spoken(self._rate))
            spoken.rows.extend(spoken.bands.push(np.frombuffer(pcm, "<i2").astype(np.float32) * np.float32(2**-15)))

    def plays(self, heard: dict[int, int], now_s: float) -> None:
        """At `now_s` the ear is at these media positions of the streams that are not over, in samples."""
        at = int(now_s / HOP_S)
        passed = min(_MEMORY, at - self._ear_at) if self._ear_at is not None else _MEMORY
        self._ear_at = at
        if passed > 0 and (heard or self._ear.any()):
            self._ear = np.concatenate((self._ear[passed:], np.zeros((passed, _BANDS), np.float32)))
        for stream in [stream for stream in self._streams if stream not in heard]:
            del self._streams[stream]
        for stream, samples in heard.items():
            spoken = self._streams.get(stream)
            if spoken is None:
                continue
            hops = samples / self._hop
            moved, spoken.heard_hops = hops - spoken.heard_hops, hops
            # A position that leaps (the first report after estimates) leaves the leap out.
            for back in range(min(passed, round(moved) + 1) if moved > 0 else 0):
                row = int(hops) - back - spoken.first
                if 0 <= row < len(spoken.rows):
                    self._ear[-1 - back] = np.maximum(self._ear[-1 - back], spoken.rows[row])
            while spoken.first < int(hops) - _MEMORY and spoken.rows:
                spoken.rows.popleft()
                spoken.first += 1

    # -- the microphone

    def judge(self, frame: Samples, probability: float, now_s: float) -> float:
        """The probability that the user speaks, for the next frame of the microphone, which came at `now_s`.

        `probability` is the voice activity's.
        """
        self._unseen.append(frame)
        self._frames += 1
        began_s = now_s - self._frames * 2 * HOP_S
        # Never later than a frame really came; it may creep forward, as the two clocks drift.
        self._began_s = min(began_s, self._began_s + 1e-5) if self._began_s is not None else began_s
        if probability < 0.3 or self._ear_at is None:
            return probability
        late = self._ear_at - int((self._began_s + self._frames * 2 * HOP_S) / HOP_S)
        ear = self._ear_before(late)
        if not (ear > _AUDIBLE).any():
            return probability
        rows = self._heard.push(np.concatenate(self._unseen))[-_WINDOW:]
        self._unseen.clear()
        self._microphone = np.concatenate((self._microphone[len(rows) :], rows))
        self._looks += 1
        if self.lag is None or self._looks % _FOLLOW_EVERY == 0:
            self._follow(ear)
        if self.lag is None:
            return 0.0 if self._is_suspect else probability
        return 0.0 if self._is_echo(ear, self.lag) else probability

    def _ear_before(self, late: int) -> NDArray[np.float32]:
        """What was at the ear up to the newest row of the microphone, which is `late` hops behind the ear's."""
        late = max(0, min(late, _MEMORY - 1))
        ear = self._ear[: _MEMORY - late]
        return np.concatenate((np.zeros((late, _BANDS), np.float32), ear))

    def _follow(self, ear: NDArray[np.float32]) -> None:
        """Look for our sound in the microphone's last second."""
        heard = _levels(self._microphone)
        played = _levels(ear)
        heard -= heard.mean(axis=0)
        # (lags, window, bands): the newest last; lag 0 is the last of them.
        shifted = sliding_window_view(played, _WINDOW, axis=0).swapaxes(1, 2)
        shifted = shifted - shifted.mean(axis=1, keepdims=True)
        energy = np.sqrt(np.square(shifted).sum(axis=(1, 2)) * np.square(heard).sum() + 1e-9)
        alike = np.einsum("ltb,tb->l", shifted, heard) / energy
        best = int(alike.argmax())
        lag = len(alike) - 1 - best
        if self._is_ours(ear, lag, float(alike[best])):
            if self.lag is None or abs(lag - self.lag) > 2:
                self._gains.clear()
                self._gain = None
                self._learn(ear, lag, _WINDOW)
            self.lag = lag
        elif self.lag is not None:
            is_faint = self._gain is not None and float(self._gain.mean()) <= _FAINT_DB
            if alike[len(alike) - 1 - self.lag] < (_KEEP_FAINT if is_faint else _KEEP):
                self.lag = None

    def _is_ours(self, ear: NDArray[np.float32], lag: int, alike: float) -> bool:
        """Whether the microphone hears our sound, so much alike, `lag` hops later."""
        played = ear[len(ear) - lag - _WINDOW : len(ear) - lag].sum(axis=1)
        sounding = played > _AUDIBLE
        count = int(sounding.sum())
        self._is_suspect = False
        if not count:
            return False
        gain_db = np.median(_decibels(self._microphone.sum(axis=1)[sounding]) - _decibels(played[sounding]))
        if count < _SHORTEST:
            self._is_suspect = alike >= _LOCK_SOON and bool(gain_db <= _QUIET_DB)
            return False
        if gain_db <= _FAINT_DB:
            return alike >= _LOCK_FAINT
        if count < _LONG:
            return alike >= _LOCK_SOON and (count >= _SHORT or bool(gain_db <= _QUIET_DB))
        return alike >= _LOCK

    def _learn(self, ear: NDArray[np.float32], lag: int, hops: int) -> None:
        """How loud each band comes back, from the last `hops`."""
        played = ear[len(ear) - lag - hops : len(ear) - lag]
        heard = self._microphone[-hops:]
        for before, after in zip(played, heard, strict=True):
            if before.sum() > _AUDIBLE:
                self._gains.append(_decibels(after) - _decibels(before))

    def _is_echo(self, ear: NDArray[np.float32], lag: int) -> bool:
        """Whether the echo explains most of the newest frame; a frame that it does teaches how loud it is."""
        if self._gain is None or self._looks % _FOLLOW_EVERY == 0:
            if not self._gains:
                return False
            # Below the middle: where the user spoke too, less of it was echo than came back.
            self._gain = np.percentile(np.array(self._gains), 40, axis=0).astype(np.float32)
        end = len(ear) - lag
        # The delay is known to a hop, so the rows next to it count in full; and a room keeps sounding.
        around = ear[max(0, end - 8) : min(len(ear), end + 1)]
        age = np.maximum(0, np.arange(len(around) - 1, -1, -1) - 2)
        expected = (around * _TAIL ** age[:, None]).max(axis=0) * 10 ** ((self._gain + _MARGIN_DB) / 10)
        heard = self._microphone[-2:].mean(axis=0)
        unexplained = np.maximum(0.0, heard - expected).sum() / (heard.sum() + _FLOOR)
        is_echo = bool(unexplained < _USER_SHARE)
        if is_echo:
            self._learn(ear, lag, 2)
        return is_echo


def _levels(bands: NDArray[np.float32]) -> NDArray[np.float32]:
    """Decibels above what can be heard, so that silence and noise are alike."""
    return np.maximum(_decibels(bands), -65.0)


def _decibels(bands: NDArray[np.float32]) -> NDArray[np.float32]:
    decibels: NDArray[np.float32] = (10 * np.log10(bands + _FLOOR)).astype(np.float32)
    return decibels
