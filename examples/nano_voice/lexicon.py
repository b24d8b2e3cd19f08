"""Write the pronunciation lexicon that ships with the voice: one line a word, taken from the teacher's dictionaries.

The teacher's dictionaries are misaki's (Apache-2.0).  Words whose sound depends on the part of speech keep their
default; the few that are stronger before a pause keep both forms.

    python examples/nano_voice/lexicon.py --out breeze_rtc/voices/nano/lexicon.txt.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

import hibari.tts

from breeze_rtc.models.pronunciation import Lexicon

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*'?|[A-Z]{2,}")


def entries() -> dict[str, str]:
    """word -> phonemes, or "phonemes<TAB>phonemes before a pause"."""
    found: dict[str, str] = {}
    # Common words first: a dictionary read later never replaces what an earlier one said.
    for name in ("gold", "silver"):
        data = json.loads(gzip.decompress((Path(hibari.tts.ASSETS) / f"lexicon_us_{name}.json.gz").read_bytes()))
        for key in sorted(data, key=lambda key: (key != key.lower(), key)):
            value = data[key]
            word = key if len(key) > 1 and key.isupper() else key.lower()
            if word in found or not _WORD.fullmatch(word) or len(word) > 20:
                continue
            if len(word) == 1 and not key.isupper():
                continue  # a letter's name is listed under the capital
            if name == "silver" and len(word) > 11:
                continue
            forms = [value] if isinstance(value, str) else [value["DEFAULT"], value.get("None")]
            forms = [form.replace("ɾ", "T").replace("ʔ", "t") for form in forms if form]
            if word.isupper() and (found.get(word.lower()) == forms[0] or word in {"US", "IT"}):
                continue  # "US" and "IT" in capitals are initials
            if forms:
                found[word] = "\t".join(forms)
    return found


def without_regular(found: dict[str, str]) -> dict[str, str]:
    """Leave out what the front end derives from a shorter entry anyway: rules, roles, ruled, ruling."""
    kept: dict[str, tuple[str, str]] = {}
    reader = Lexicon(kept)
    for word in sorted(found, key=lambda word: (len(word), word)):
        usual, _, final = found[word].partition("\t")
        forms = (usual, final or usual)
        if word.isupper() or reader.look_up(word) != forms:
            kept[word] = forms
    return {word: found[word] for word in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(f"{word}\t{forms}" for word, forms in sorted(without_regular(entries()).items())) + "\n"
    with out.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(lines.encode())
    print(f"{out}: {lines.count(chr(10))} words, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
