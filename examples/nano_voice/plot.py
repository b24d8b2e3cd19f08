"""Draw the training curves from the logs of both trainings.

python examples/nano_voice/plot.py --work nano_work --out curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))

    codec = [json.loads(line) for line in (arguments.work / "codec_log.jsonl").read_text().splitlines()]
    for name in ("harmonic", "noise"):
        left.plot([line["step"] for line in codec], [line[name] for line in codec], label=name)
    left.set(title="Codec", xlabel="step", ylabel="L1 (neper)", ylim=(0, 1))
    left.legend()

    language = [json.loads(line) for line in (arguments.work / "lm_log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in language]
    for index, name in enumerate(("c0", "c1", "c4", "c7", "advance")):
        for kind, style in (("validation", "-"), ("train", ":")):
            values = [line[kind][name] for line in language]
            label = name if kind == "validation" else None
            right.plot(steps, values, style, color=f"C{index}", label=label)
    right.set(title="Language model (dotted: training, its history worn)", xlabel="step", ylabel="cross-entropy (nat)")
    right.legend()
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
