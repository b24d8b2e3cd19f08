"""A caller speaks over the agent at a real telephone: does the history say what came out of it, and how soon is it
silent?

baresip calls over SIP and RTP, the test carrier (PJSIP's clock) keeps each carrier's rules; `sip` is the server's own
door.  The truth is what came out of the telephone, an instrument that goes before other programs where that is allowed.

* words: of the history, less those heard to their end; between -1 and 1 is what is promised;
* position: what the line believed when all was settled, less the truth, ms (later than the ear is positive);
* silence: from the decision until nothing comes out, ms, of which *held* was in the telephone's own buffers: from RTP
  to the ear, at the last sound.

Calls in which the machine kept a program waiting are counted (`stalled`), and in the figures.

    python bench/phone_cuts.py [--quick] [--calls N] [--kinds twilio ... sip] [--seed N] [--json FILE]

Needs baresip and espeak-ng (Debian), and PJSIP (`pip install pjsua2-python`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), *(str(HERE / "tests" / name) for name in ("server", "transport", "agent", "carrier"))]


async def main(options: argparse.Namespace) -> None:
    from barge_in import LINES, barge_in
    from tone_engine import RATE, WORD

    chance = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    for kind in options.kinds or (("twilio", "sip") if options.quick else LINES):
        calls = []
        for _ in range(options.calls):
            with tempfile.TemporaryDirectory() as folder:
                calls.append(await barge_in(kind, Path(folder) / "phone", after_s=chance.uniform(1.0, 2.0)))
        rows.append(
            {
                "kind": kind,
                "words_off": [len(call.history.split()) - int(call.heard_words) for call in calls],
                "position_ms": [
                    round((call.believed_words - call.heard_words) * WORD * 1_000 / RATE) for call in calls
                ],
                "silent_ms": [round(call.silent_ms) for call in calls],
                "held_ms": [round(call.own_ms[1]) for call in calls],
                "stalled": sum(bool(call.stalls) for call in calls),
                "faults": sum(bool(call.faults) for call in calls),
            }
        )
        row = rows[-1]
        print(
            f"{kind}: {len(calls)} calls, {row['stalled']} stalled, {row['faults']} outside what is promised; "
            f"words off {sorted(set(row['words_off']))}; "
            + "; ".join(f"{name} {spread(row[name])} ms" for name in ("position_ms", "silent_ms", "held_ms")),
            flush=True,
        )
    if options.json:
        values = {"python": platform.python_version(), "arguments": sys.argv[1:], "rows": rows}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    words = max(abs(words) for row in rows for words in row["words_off"])
    silent = [ms for row in rows for ms in row["silent_ms"]]
    print(
        f"RESULT calls={sum(len(row['words_off']) for row in rows)} words_off_at_most={words} "
        f"silent_p50_ms={np.median(silent):.0f} silent_max_ms={max(silent)} faults={sum(row['faults'] for row in rows)}"
    )


def spread(values: list[int]) -> str:
    return f"{min(values)} / {np.median(values):.0f} / {max(values)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lines, two calls each")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.calls = 2
    asyncio.run(main(given))
