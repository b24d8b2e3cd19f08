"""Tests of a voice agent without a browser, a network or a wait: see docs/testing.md."""

from breeze_rtc.testing.call import BargeIn, Caller
from breeze_rtc.testing.ear import HeardWord, Network, Recording
from breeze_rtc.testing.virtual_time import run, virtual_time
from breeze_rtc.testing.voice import ToneVoice, Word

__all__ = ["BargeIn", "Caller", "HeardWord", "Network", "Recording", "ToneVoice", "Word", "run", "virtual_time"]
