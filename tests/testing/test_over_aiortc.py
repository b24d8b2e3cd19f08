"""What the history says was heard is what was heard: a real server, a real peer connection, real time."""

from __future__ import annotations

import asyncio

import numpy as np
from barge_ins import STORY, STORYTELLER, moments, words_off
from page import Page, serving, until

from breeze_rtc.media import rtp
from breeze_rtc.testing import Recording, ToneVoice

CUTS = 20


def recording(page: Page, voice: ToneVoice) -> Recording:
    """What left the page's loudspeaker, on the RTP clock."""
    heard = page.listener.heard
    first = heard[0].rtp
    pcm = page.listener.pcm(first, rtp.distance(first, heard[-1].rtp) + 960)
    for start, end in page.silences:
        pcm[max(0, rtp.distance(first, start)) : max(0, rtp.distance(first, end))] = 0
    return Recording(pcm, 48_000, voice.words, 0.0)


def is_sounding(page: Page) -> bool:
    return bool(page.listener.heard) and int(np.abs(page.listener.heard[-1].pcm).max()) > 2_000


async def cuts(words_per_minute: int, *, has_underrun: bool) -> tuple[list[int], list[float]]:
    """Words off at each cut of one call, and the holes in what was heard."""
    voice = ToneVoice(words_per_minute=words_per_minute, stalls={4: 2.0} if has_underrun else {})
    async with serving(STORYTELLER, engine=voice) as hall, hall.page() as page:
        await page.call()
        for moment_s in moments(seed=words_per_minute, count=CUTS, longest_s=4.5):
            await page.type("go")
            await until(lambda: is_sounding(page))
            await asyncio.sleep(moment_s)
            ends = len(page.all("speech_end"))
            await page.send(type="interrupt")
            await until(lambda ends=ends: len(page.all("speech_end")) > ends)
            await asyncio.sleep(0.3)
        ear = recording(page, voice)
        off = []
        for end in page.all("speech_end"):
            words = [heard for heard in ear.words if heard.word.stream == end["stream"]]
            off.append(words_off(STORY[: end["chars"]], words))
        return off, ear.gaps_s


async def test_words_at_twenty_random_cuts_are_within_one_over_aiortc() -> None:
    """At 120, 170 and 250 words a minute, with and without a hole of 1.5 s: six calls at once, 120 cuts.

    Reproductions 1 and 6 (pipecat#5426, livekit#2201): whatever carries the sound.
    """
    rates = [(rate, has_underrun) for rate in (120, 170, 250) for has_underrun in (False, True)]
    results = await asyncio.gather(*(cuts(rate, has_underrun=has_underrun) for rate, has_underrun in rates))
    for (rate, has_underrun), (off, gaps) in zip(rates, results, strict=True):
        print(rate, has_underrun, off, [round(gap, 2) for gap in gaps])
        assert len(off) == CUTS
        assert max(off) <= 1, (rate, has_underrun, off)
        assert not has_underrun or max(gaps) > 1.3
