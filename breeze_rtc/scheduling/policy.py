"""Which rules of the scheduler are on.

The default is the product.  The other settings exist so that the worth of each rule can be measured, and so that the
schedulers of others can be run on the same core; `bench/ablation.py` does both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.chunking import LADDER


class Order(Enum):
    """Who is served first among those who have spoken."""

    SLACK = "slack"
    """Least slack: time until the listener runs dry, less the work the next sound still needs."""
    FIRST_COME = "first_come"
    """In the order in which the streams opened."""
    CLASS = "class"
    """Fixed priority, then as they opened."""
    ROUND_ROBIN = "round_robin"
    """Whoever was served longest ago."""
    QOE = "qoe"
    """The token-level schedulers of text serving (Andes, arXiv 2404.16283; TokenFlow, 2510.02758): the least share of
    its buffer, sound in hand over sound delivered, so that many small buffers weigh like few large ones."""
    CRITICAL = "critical"
    """VoxServe (arXiv 2602.00269): a stream is critical when its playback is estimated to end within one second;
    critical ones first, as they opened, and the others ride along."""


class FirstSound(Enum):
    """What a stream that has not spoken may ask of those who have."""

    FEASIBLE = "feasible"
    """It goes first if what is left of its way to sound fits into everybody's slack."""
    ALWAYS = "always"
    """It goes first, whoever falls silent by it."""
    IN_ORDER = "in_order"
    """It goes when nobody who has spoken has anything due."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of design.md, section 3, one switch or number each."""

    order: Order = Order.SLACK
    first_sound: FirstSound = FirstSound.FEASIBLE
    deferral_is_bounded: bool = True
    """No first sound waits for others longer than its class allows (`DEFERRAL_NS`)."""
    lead_cap_ns: int | None = 1_200 * MS
    """Interactive streams are made at most this far ahead of the ear; None: as far as there is time."""
    lead_by_load: bool = True
    """A machine with time to spare keeps less than that: what it needs to make the next chunk, and to stumble."""
    ladder: tuple[int, ...] = LADDER
    """Codec frames per chunk, climbing.  One rung is a fixed chunk."""
    chunk_by_slack: bool = True
    """The next chunk is the largest rung that slack allows; False: one rung more each time, whatever the slack."""
    flushes_early: bool = True
    """A chunk that would be full too late is sent as it is."""
    prefills_together: bool = True
    """Prompts that wait together run together; False: one prompt in a step."""
    waits_for_rows: bool = True
    """A frame step waits for rows about to join it when that saves time and nobody's slack."""
    rescues: bool = True
    """In danger, a step carries only those it helps; frames in hand ride along in a codec step of their shape."""
    admits_by_load: bool = True
    """A listener is refused when all together would need more than the machine can make."""
    uses_reports: bool = True
    """Deadlines come from where the listener is; False: from the published estimate, first output plus sound sent."""
    predicts: bool = True
    """Step times are predicted; False: there is no slack anywhere, see `as_it_runs`."""
    guard_ns: int = 4 * MS
    """Kept between a predicted end and a deadline: for the driver itself, and the hand-over to the sink."""

    def __post_init__(self) -> None:
        assert self.ladder, "a ladder has a rung"
        assert list(self.ladder) == sorted(set(self.ladder)), "a ladder climbs"
        assert self.ladder[0] >= 1, "a chunk has a frame"

    def as_it_runs(self) -> Policy:
        """Without predictions there is no slack to go by, so what goes by slack goes by turns and by the ladder."""
        if self.predicts:
            return self
        return replace(
            self,
            order=Order.ROUND_ROBIN if self.order is Order.SLACK else self.order,
            first_sound=FirstSound.IN_ORDER if self.first_sound is FirstSound.FEASIBLE else self.first_sound,
            lead_by_load=False,
            chunk_by_slack=False,
            flushes_early=False,
            waits_for_rows=False,
            rescues=False,
        )

    def state(self) -> dict[str, Any]:
        """Plain values, to be written down."""
        return {**asdict(self), "order": self.order.value, "first_sound": self.first_sound.value}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Policy:
        """The policy whose `state()` was `state`."""
        values = dict(state)
        return cls(
            **{
                **values,
                "order": Order(values["order"]),
                "first_sound": FirstSound(values["first_sound"]),
                "ladder": tuple(values["ladder"]),
            }
        )
