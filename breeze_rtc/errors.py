"""Every error this package raises on purpose.

BreezeError
├── PeerError            the other side of a connection broke the rules
├── BadRequest           a caller asked for something that cannot be done as asked
│   ├── BadText          empty, too long, or not text
│   ├── BadSampling      a sampling value is not finite or out of range
│   ├── LineCannot       the line of this call cannot do what was asked of it
│   ├── BadRecording     a recording that no voice can be made of
│   └── UnknownVoice     no such voice
├── CarrierRefused       a telephone carrier did not do what was asked of it
├── NoAnswer             a telephone was called, and nobody answered
├── Overloaded           no room for one more stream now; try again later
├── EngineClosed         the engine has stopped, or died and is starting again
├── StepFailed           a stage raised while it computed a stream
├── BadTrace             a recorded trace cannot be replayed
├── CannotKeep           the disk is full, or may not be written
├── CheckpointError      weights are missing, truncated or of another model
└── MissingExtra         an optional dependency is not installed

An error holds facts and makes its sentence in `__str__`; where there is something to do next, the sentence says it.
"""

from __future__ import annotations


class BreezeError(Exception):
    """The root of the tree."""


class PeerError(BreezeError):
    """The other side sent something that breaks the protocol."""

    def __init__(self, code: str, detail: str, fix: str = "") -> None:
        super().__init__(code, detail, fix)
        self.code = code
        self.detail = detail
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.detail}. {self.fix}" if self.fix else self.detail


class BadRequest(BreezeError):
    """What was asked cannot be done as asked."""


class BadText(BadRequest):
    """The text cannot be spoken."""


class BadSampling(BadRequest):
    """A sampling value is not finite or lies outside its range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name = name
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} is out of range; it must be {self.allowed}"


class LineCannot(BadRequest):
    """The line of this call cannot do it: it is no telephone's, or its carrier has no way."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.what} is not possible on this line: {self.why}"


class BadRecording(BadRequest):
    """No voice can be made of this recording."""


class UnknownVoice(BadRequest):
    """There is no voice of that name."""

    def __init__(self, voice: str, known: tuple[str, ...]) -> None:
        super().__init__(voice, known)
        self.voice = voice
        self.known = known

    def __str__(self) -> str:
        others = f"; this model has {', '.join(self.known)}" if self.known else ""
        return f"no voice is called {self.voice!r}{others}"


class CarrierRefused(BreezeError):
    """A carrier's REST interface said no, or could not be reached."""

    def __init__(self, carrier: str, detail: str) -> None:
        super().__init__(carrier, detail)
        self.carrier = carrier
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.carrier} refuses: {self.detail}"


class NoAnswer(BreezeError):
    """A telephone was called and the call did not begin."""

    def __init__(self, number: str, state: str) -> None:
        super().__init__(number, state)
        self.number = number
        self.state = state
        """In the carrier's words: busy, no-answer, failed ..."""

    def __str__(self) -> str:
        return f"{self.number} did not answer: {self.state}"


class Overloaded(BreezeError):
    """There is no room for one more stream now."""

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail, retry_after_s)
        self.detail = detail
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.detail}; try again in {self.retry_after_s:g} s"


class EngineClosed(BreezeError):
    """The engine is not running."""


class StepFailed(BreezeError):
    """A stage raised while it computed this stream; other streams go on."""

    def __init__(self, stage: str, cause: str) -> None:
        super().__init__(stage, cause)
        self.stage = stage
        self.cause = cause

    def __str__(self) -> str:
        return f"the {self.stage} stage failed: {self.cause}"


class BadTrace(BreezeError):
    """A file is not a trace of the scheduler, or not one that this version replays."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.path} cannot be replayed: {self.detail}"


class CannotKeep(BreezeError):
    """Something cannot be written to its folder; what was there before is there still."""


class CheckpointError(BreezeError):
    """A checkpoint is missing, truncated, or of another model."""


class MissingExtra(BreezeError):
    """An optional part is not installed."""

    def __init__(self, what: str, extra: str, then: str = "") -> None:
        super().__init__(what, extra, then)
        self.what = what
        self.extra = extra
        self.then = then

    def __str__(self) -> str:
        install = f"pip install 'breeze_rtc[{self.extra}]'" if self.extra else ""
        commands = " && ".join(filter(None, (install, self.then)))
        return f"{self.what} needs an optional part: {commands}"
