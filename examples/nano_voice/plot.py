"""Draw losses and word error against training time, from the logs that the trainings write.

python examples/nano_voice/plot.py --work nano_work --out curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw(axes: Axes, lines: list[dict[str, Any]], names: tuple[str, ...], title: str, unit: str) -> None:
    for name in names:
        axes.plot([line["cpu_s"] / 60 for line in lines], [line[name] for line in lines], label=name)
    axes.set(title=title, xlabel="CPU-minutes", ylabel=unit)
    axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure, ((codec, sound), (language, error)) = plt.subplots(2, 2, figsize=(11, 7))

    bands = ("harmonic", "noise")
    draw(codec, lines_of(arguments.work / "codec_log.jsonl"), bands, "Codec", "L1 (neper)")
    draw(sound, lines_of(arguments.work / "sound_log.jsonl"), ("sound",), "Decoder, towards the sound", "spectral loss")

    lines = lines_of(arguments.work / "lm_log.jsonl")
    minutes = [line["cpu_s"] / 60 for line in lines]
    for index, name in enumerate(("c0", "c1", "c4", "c7", "advance")):
        for kind, style in (("validation", "-"), ("train", ":")):
            label = name if kind == "validation" else None
            language.plot(minutes, [line[kind][name] for line in lines], style, color=f"C{index}", label=label)
    language.set(
        title="Language model (dotted: training, its history worn)", xlabel="CPU-minutes", ylabel="cross-entropy (nat)"
    )
    language.legend(frameon=False)

    heard = [line for line in lines if "word_error" in line]
    error.plot([line["cpu_s"] / 60 for line in heard], [100 * line["word_error"] for line in heard], "o-")
    error.set(title="What Whisper tiny.en hears", xlabel="CPU-minutes of the language model", ylabel="word error, %")
    error.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
