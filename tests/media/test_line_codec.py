from __future__ import annotations

import numpy as np
import pytest

from breeze_rtc.media.line_codec import LineCodec

SINE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(1_600) / 8_000)).astype(np.float32)


@pytest.mark.parametrize(("name", "silence"), [("PCMU", b"\xff"), ("PCMA", b"\xd5"), ("L16", b"\0\0")])
def test_silence_is_the_byte_that_telephones_mean_by_it(name: str, silence: bytes) -> None:
    assert LineCodec(name).silence(160) == 160 * silence


@pytest.mark.parametrize(("name", "snr_db"), [("PCMU", 35), ("PCMA", 35), ("L16", 80)])
def test_sound_comes_back_as_good_as_the_law_allows(name: str, snr_db: float) -> None:
    """G.711 keeps about 38 dB at this level."""
    codec = LineCodec(name)
    back = codec.decode(codec.encode(SINE)) / 32_768
    noise = np.mean((back - SINE) ** 2)
    assert 10 * np.log10(np.mean(SINE**2) / noise) > snr_db
    assert len(codec.encode(SINE)) == len(SINE) * (2 if name == "L16" else 1)


@pytest.mark.parametrize(
    ("code", "sample"), [(0xFF, 0), (0x7F, 0), (0x80, 32_124), (0x00, -32_124), (0xF0, 120), (0x8F, 16_764)]
)
def test_mu_law_is_the_table_of_the_recommendation(code: int, sample: int) -> None:
    """ITU-T G.711 table 2a, times four, as 16 bits write it."""
    assert LineCodec("PCMU").decode(bytes([code])).tolist() == [sample]


@pytest.mark.parametrize("name", ["PCMU", "PCMA"])
def test_every_code_reads_back_as_itself(name: str) -> None:
    codec = LineCodec(name)
    codes = bytes(range(256))
    samples = codec.decode(codes)
    again = codec.decode(codec.encode(samples.astype(np.float32) / 32_768))
    assert again.tolist() == samples.tolist()


def test_the_order_of_bytes_is_the_carriers() -> None:
    one = np.array([1 / 32_768], np.float32)
    assert LineCodec("L16").encode(one) == b"\x01\x00"
    assert LineCodec("L16", is_big_endian=True).encode(one) == b"\x00\x01"
    assert LineCodec("L16", is_big_endian=True).decode(b"\x00\x01\x07").tolist() == [1]


@pytest.mark.parametrize("name", ["PCMU", "PCMA", "L16"])
def test_what_is_too_loud_is_clipped(name: str) -> None:
    codec = LineCodec(name)
    loud = codec.decode(codec.encode(np.array([3.0, -3.0], np.float32)))
    assert loud[0] > 31_000
    assert loud[1] < -31_000
