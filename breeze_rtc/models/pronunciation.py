"""Text front end of the nano voice: written English in, phoneme and letter tokens out.

Text may arrive in any pieces.  It is cut into segments where speech may pause, each segment is read (numbers, money,
times, abbreviations, addresses become words), words become phonemes by the lexicon or letters where it does not know
them, and every token remembers how much of the written text has been spoken once it is over.  What nobody can say
(emoji, other scripts, control characters) is passed over in silence.
"""

from __future__ import annotations

import gzip
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import typeguard

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.speech_model import TextSegment

# inflect has all its functions rewritten with type checks while it is imported, which takes 1.6 s, a third of the time
# until the engine is ready; without them it takes 12 ms.
_checked = typeguard.typechecked
typeguard.typechecked = lambda function: function  # type: ignore[assignment]
try:
    import inflect
finally:
    typeguard.typechecked = _checked

VOWELS = frozenset("AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻɐᵊ")
_STRESS = "ˈˌ"
_VOICELESS = frozenset("ptkfθ")
_SIBILANT = frozenset("szʃʒʧʤ")
_FLAPPING = frozenset("AIOWYiuæɑəɛɪɹʊʌ")

SOUNDS = "AIOQWYaiuæɑɔəɛɜɪʊʌᵻɐᵊbdfhjklmnpstvwzðŋɡɹʃʒʤʧθTx"
"""Phonemes of the lexicon, misaki's alphabet: capitals are diphthongs, T is a flapped t."""
LETTERS = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz'", 1)}
"""Letter -> token of a word the lexicon does not know; token 0 pads."""
SPACE = len(LETTERS) + 1
PUNCTUATION = {mark: SPACE + 1 + index for index, mark in enumerate(".,;:!?…")}
_FIRST_SOUND = SPACE + 1 + len(PUNCTUATION)
_SOUNDS = {sound: _FIRST_SOUND + index for index, sound in enumerate(SOUNDS)}
_STRESSED = {
    mark + sound: _FIRST_SOUND + len(SOUNDS) + index
    for index, (mark, sound) in enumerate((mark, sound) for mark in _STRESS for sound in SOUNDS if sound in VOWELS)
}
VOCABULARY = _FIRST_SOUND + len(_SOUNDS) + len(_STRESSED)


def phoneme_tokens(phonemes: str) -> Iterator[tuple[int, int]]:
    """(token, characters used so far) for each sound of a word; a stress mark and its vowel are one token."""
    mark = ""
    for used, sound in enumerate(phonemes, 1):
        if sound in _STRESS:
            mark = sound
            continue
        token = _STRESSED.get(mark + sound) if mark else None
        if token is None:
            token = _SOUNDS.get(sound)
        if token is not None:
            yield token, used
        mark = ""


def letter_tokens(word: str) -> list[int]:
    """Tokens of a word read letter by letter; what is not a letter has none."""
    return [LETTERS[letter] for letter in word.lower() if letter in LETTERS]


# Words that change with what follows: (before a vowel, before a consonant, before a pause).
_CONTEXT = {
    "a": ("ɐ", "ɐ", "ˈA"),
    "an": ("ɐn", "ɐn", "ɐn"),
    "am": ("ɐm", "ɐm", "æm"),
    "i": ("ˌI", "ˌI", "ˌI"),
    "in": ("ɪn", "ɪn", "ˈɪn"),
    "the": ("ði", "ðə", "ðə"),
    "to": ("tʊ", "tə", "tu"),
}


class Lexicon:
    """How words are said: a word list, regular endings, and what a neighbour changes."""

    def __init__(self, forms: dict[str, tuple[str, str]]) -> None:
        self._forms = forms

    @classmethod
    def load(cls, path: Path) -> Lexicon:
        forms: dict[str, tuple[str, str]] = {}
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            word, _, rest = line.partition("\t")
            usual, _, final = rest.partition("\t")
            forms[word] = (usual, final or usual)
        return cls(forms)

    def __contains__(self, word: str) -> bool:
        return self.look_up(word) is not None

    def look_up(self, word: str) -> tuple[str, str] | None:
        """(usual, before a pause) phonemes of one word, or None: it has to be read letter by letter."""
        if word.endswith("."):
            return self._forms.get(word[:-1])  # a letter that is spelled
        return self._forms.get(word) or self._forms.get(word.lower()) or self._regular(word.lower())

    def say(self, words: Sequence[str]) -> list[str | None]:
        """Phonemes of the words of one breath group (a pause follows the last), None where a word is unknown."""
        said: list[str | None] = []
        following = None  # True: a vowel follows, False: a consonant, None: a pause
        for index in range(len(words) - 1, -1, -1):
            word = words[index].lower()
            if word in _CONTEXT:
                before_vowel, before_consonant, before_pause = _CONTEXT[word]
                phonemes = before_pause if following is None else before_vowel if following else before_consonant
            elif word == "used" and index + 1 < len(words) and words[index + 1].lower() == "to":
                phonemes = "jˈust"
            elif (forms := self.look_up(words[index])) is not None:
                phonemes = forms[1] if following is None else forms[0]
            else:
                said.append(None)
                following = word[0] in "aeiou"
                continue
            said.append(phonemes)
            first = next((sound for sound in phonemes if sound not in _STRESS), "")
            following = first in VOWELS
        said.reverse()
        return said

    def _regular(self, word: str) -> tuple[str, str] | None:
        """Plural and possessive -s, past -ed and -ing of a known word."""
        stem = None
        if word.endswith("s'"):
            return self._forms.get(word[:-1]) or self._regular(word[:-1])
        if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
            stem = self._stem(word[:-1]) or (self._stem(word[:-2]) if word.endswith(("'s", "es")) else None)
            if stem is None and word.endswith("ies"):
                stem = self._stem(word[:-3] + "y")
            if stem:
                end = "ᵻz" if stem[-1] in _SIBILANT else "s" if stem[-1] in _VOICELESS else "z"
                return stem + end, stem + end
        if len(word) > 3 and word.endswith("ed"):
            stem = self._stem(word[:-1]) or self._stem(word[:-2]) or self._undoubled(word[:-2])
            if stem:
                if stem[-1] in "td":
                    said = (stem[:-1] + "T" if stem[-1] == "t" and stem[-2:-1] in _FLAPPING else stem) + "ᵻd"
                else:
                    said = stem + ("t" if stem[-1] in "pkfθʃsʧ" else "d")
                return said, said
        if len(word) > 4 and word.endswith("ing"):
            stem = self._stem(word[:-3]) or self._stem(word[:-3] + "e") or self._undoubled(word[:-3])
            if stem:
                said = (stem[:-1] + "T" if stem[-1] == "t" and stem[-2:-1] in _FLAPPING else stem) + "ɪŋ"
                return said, said
        return None

    def _stem(self, word: str) -> str | None:
        forms = self._forms.get(word) if len(word) > 1 else None
        return forms[0] if forms else None

    def _undoubled(self, word: str) -> str | None:
        return self._stem(word[:-1]) if len(word) > 3 and word[-1] == word[-2] else None


_MARKS = {".": ".", ",": ",", ";": ";", ":": ":", "!": "!", "?": "?", "…": "…", "—": ",", "–": ",", "(": ",", ")": ","}
_ENDS = frozenset(".!?…")
_CLAUSES = frozenset(",;:—–")
_TITLES = {
    "dr": "doctor",
    "mr": "mister",
    "mrs": "missus",
    "ms": "miz",
    "prof": "professor",
    "st": "saint",
    "jr": "junior",
    "sr": "senior",
    "vs": "versus",
    "approx": "approximately",
    "dept": "department",
    "gen": "general",
    "gov": "governor",
    "rev": "reverend",
    "sen": "senator",
    "sgt": "sergeant",
    "capt": "captain",
    "lt": "lieutenant",
    "mt": "mount",
    "etc": "et cetera",
    "inc": "incorporated",
    "ltd": "limited",
    "corp": "corporation",
    "est": "established",
    "ave": "avenue",
    "blvd": "boulevard",
    "tel": "telephone",
    "ext": "extension",
    "fig": "figure",
}
"""Abbreviations whose full stop does not end a sentence."""
_INITIALISMS = frozenset(
    "AI AM CD CEO CFO CTO DIY EU FAQ HR ID IP IT PC PM PR TV UK UN US VIP".split()  # noqa: SIM905
)
_UNITS = {
    "km": "kilometers",
    "kg": "kilograms",
    "cm": "centimeters",
    "mm": "millimeters",
    "m": "meters",
    "g": "grams",
    "mg": "milligrams",
    "ml": "milliliters",
    "mph": "miles per hour",
    "kmh": "kilometers per hour",
    "kb": "kilobytes",
    "mb": "megabytes",
    "gb": "gigabytes",
    "tb": "terabytes",
    "hz": "hertz",
    "khz": "kilohertz",
    "ghz": "gigahertz",
    "ms": "milliseconds",
    "lb": "pounds",
    "lbs": "pounds",
    "oz": "ounces",
    "ft": "feet",
    "w": "watts",
    "kw": "kilowatts",
    "%": "percent",
    "°c": "degrees celsius",
    "°f": "degrees fahrenheit",
    "°": "degrees",
    "min": "minutes",
    "mins": "minutes",
    "sec": "seconds",
    "secs": "seconds",
    "hrs": "hours",
}
_COINS = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
_SYMBOLS = {"&": "and", "+": "plus", "=": "equals", "@": "at", "%": "percent", "#": "number", "°": "degrees"}
_MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905
_PIECE = re.compile(
    r"""
    (?P<web>https?://[^\s<>"]+|www\.[^\s<>"]+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+)
    |(?P<domain>\b[a-z0-9-]{2,}(?:\.[a-z0-9-]{2,})*\.(?:com|org|net|io|ai|dev|edu|gov|co|uk|de|app)\b(?:/[\w/.-]*\w)?)
    |(?P<money>[$£€]\s?\d[\d,]*(?:\.\d+)?(?:\s(?:thousand|million|billion|trillion)\b)?)
    |(?P<date>\b\d{4}-\d\d-\d\d\b)
    |(?P<time>\b\d{1,2}:\d\d(?::\d\d)?(?:\s?[ap]\.?m\b\.?)?|\b\d{1,2}\s?[ap]\.?m\b\.?)
    |(?P<phone>(?<![\w.])\+?(?:\d{1,3}[ -])?(?:\(\d{3}\)\s?|\d{3}[ -])\d{3}-\d{4}\b|\b\d{3}-\d{4}\b)
    |(?P<ordinal>\b\d[\d,]*(?:st|nd|rd|th)\b)
    |(?P<range>\b\d+(?:\.\d+)?\s?[-–]\s?\d+(?:\.\d+)?(?![\d-]))
    |(?P<fraction>\b\d{1,3}/\d{1,3}\b)
    |(?P<number>(?:(?<![\w-])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?(?:km/h|%|°[cf]?|(?:kmh|km|kg|cm|mm|mg|ml|mph|
        kb|mb|gb|tb|khz|ghz|hz|ms|lbs?|oz|ft|kw|mins?|secs?|hrs|[mgw])\b))?|\.\d+)
    |(?P<initials>\b(?:[a-z]\.){2,})
    |(?P<abbreviation>\b(?:TITLES|no(?=\.\s?\d))\.)
    |(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*['’]?)
    |(?P<mark>\.{2,}|[.,;:!?…—–()]|(?<=\s)-+(?=\s)|--+)
    |(?P<symbol>[&+=@%#°])
    """.replace("TITLES", "|".join(sorted(_TITLES, key=len, reverse=True))),
    re.VERBOSE | re.IGNORECASE,
)
_MAX_TOKENS = 180
_MAX_CHARS = 220  # a segment is cut at the last space before this, if nothing else has cut it
_EARLY_CHARS = (
    12  # the first segment of a stream may end with a clause once it is this long, so that speech starts sooner
)


@cache
def _speller() -> inflect.engine:
    return inflect.engine()


def _cardinal(digits: str) -> list[str]:
    """Words of a decimal number without sign; very long ones are read digit by digit."""
    whole, _, fraction = digits.replace(",", "").partition(".")
    if len(whole) > 15 or (len(whole) > 1 and whole[0] == "0"):
        words = _digits(whole)
    else:
        words = re.findall(r"[a-z]+", str(_speller().number_to_words(whole or "0", andword="")))
    return [*words, "point", *_digits(fraction)] if fraction else words


_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _digits(text: str) -> list[str]:
    return [_DIGITS[int(char)] for char in text if char in "0123456789"]


def _year(number: int) -> list[str]:
    high, low = divmod(number, 100)
    if 2000 <= number < 2010 or (low == 0 and high % 10 == 0):
        return _cardinal(str(number))
    rest = ["hundred"] if low == 0 else ["oh", *_cardinal(str(low))] if low < 10 else _cardinal(str(low))
    return [*_cardinal(str(high)), *rest]


def _ordinal(digits: str) -> list[str]:
    if len(digits) > 15:
        return _digits(digits)
    return re.findall(r"[a-z]+", str(_speller().number_to_words(_speller().ordinal(digits), andword="")))


def _spell(letters: str) -> list[str]:
    """Letters as words; the lexicon lists each by its name, under the capital."""
    return [f"{letter}." for letter in letters.lower()]


def _read_money(text: str) -> list[str]:
    coin, part = _COINS[text[0]]
    amount, _, scale = text[1:].strip().partition(" ")
    if scale:
        return [*_cardinal(amount), scale.lower(), f"{coin}s"]
    whole, _, cents = amount.replace(",", "").partition(".")
    if cents and len(cents) != 2:
        return [*_cardinal(amount), f"{coin}s"]
    words = []
    if int(whole) or not int(cents or "0"):
        words += [*_cardinal(whole), coin if int(whole) == 1 else f"{coin}s"]
    if int(cents or "0"):
        plural = "pence" if part == "penny" else f"{part}s"
        words += [*(["and"] if words else []), *_cardinal(str(int(cents))), part if int(cents) == 1 else plural]
    return words


def _read_time(text: str) -> list[str]:
    half = re.search(r"([ap])\.?m\b\.?$", text, re.IGNORECASE)
    parts = [int(part) for part in re.findall(r"\d+", text)]
    words = _cardinal(str(parts[0]))
    if len(parts) > 1 and parts[1]:
        words += ["oh", *_cardinal(str(parts[1]))] if parts[1] < 10 else _cardinal(str(parts[1]))
    elif len(parts) > 1 and not half:
        words += ["hundred"] if parts[0] > 12 else ["o'clock"]
    if len(parts) > 2:
        words += ["and", *_cardinal(str(parts[2])), "seconds"]
    return [*words, *_spell(half[1] + "m")] if half else words


def _read_web(text: str) -> list[str]:
    words: list[str] = []
    text = re.sub(r"^(https?://)?(www\.)?", "", text, flags=re.IGNORECASE).rstrip(".,;:!?)/")
    for part in re.findall(r"[A-Za-z]+|\d+|[./@_-]", text):
        if part.isdigit():
            words += _cardinal(part) if len(part) < 3 else _digits(part)
        elif part.isalpha():
            words.append(part.lower())
        else:
            words.append({".": "dot", "/": "slash", "@": "at", "_": "underscore", "-": "dash"}[part])
    return words


def _read_number(text: str) -> list[str]:
    match = re.match(r"(-?)((?:\d[\d,]*)?(?:\.\d+)?)\s?(.*)$", text)
    assert match is not None
    sign, digits, unit = match.groups()
    if re.fullmatch(r"1[1-9]\d\d|20\d\d", digits) and not unit and not sign:
        words = _year(int(digits))
    elif re.fullmatch(r"\d{7,}", digits):
        words = _digits(digits)
    else:
        words = _cardinal(digits)
    unit = unit.lower().replace("/", "")
    said = _UNITS.get(unit, "").split()
    if said and digits == "1":
        said[0] = "foot" if unit == "ft" else said[0].removesuffix("s")
    return [*(["minus"] if sign else []), *words, *said]


def _read_fraction(text: str) -> list[str]:
    top, bottom = text.split("/")
    names = {"2": ("half", "halves"), "3": ("third", "thirds"), "4": ("quarter", "quarters")}
    if bottom in names:
        return [*_cardinal(top), names[bottom][0 if top == "1" else 1]]
    return [*_cardinal(top), "over", *_cardinal(bottom)]


def _read(kind: str, text: str, lexicon: Lexicon) -> list[str]:
    """The words one piece of a text is read as; single letters that are spelled end with a full stop."""
    match kind:
        case "web" | "domain":
            return _read_web(text)
        case "money":
            return _read_money(text)
        case "date":
            year, month, day = text.split("-")
            if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
                return _digits(text)
            return [_MONTHS[int(month) - 1], *_ordinal(str(int(day))), *_year(int(year))]
        case "time":
            return _read_time(text)
        case "phone":
            return _digits(text)
        case "ordinal":
            return _ordinal(re.sub(r"\D", "", text))
        case "range":
            low, high = re.split(r"\s?[-–]\s?", text)
            return [*_read_number(low), "to", *_read_number(high)]
        case "fraction":
            return _read_fraction(text)
        case "number":
            return _read_number(text)
        case "initials":
            known = {"e.g.": ["for", "example"], "i.e.": ["that", "is"]}
            return known.get(text.lower()) or _spell(text.replace(".", ""))
        case "abbreviation":
            short = text[:-1].lower()
            return ["number"] if short == "no" else _TITLES[short].split()
        case "symbol":
            return [_SYMBOLS[text]]
    return _read_word(text, lexicon)


def _read_word(text: str, lexicon: Lexicon) -> list[str]:
    plain = unicodedata.normalize("NFKD", text.replace("’", "'"))
    word = "".join(char for char in plain if char.isascii() and (char.isalpha() or char == "'"))
    if not word.strip("'"):
        return []
    if word.isupper() and len(word) > 1 and word.isalpha():
        is_word = word in lexicon and word not in _INITIALISMS
        return [word] if is_word else _spell(word) if len(word) <= 6 else [word.lower()]
    if len(word) == 1:
        return [word if word in "aAI" else f"{word.lower()}."]
    # camelCase is two words, McDonald is one.
    return re.findall(r"[A-Z]?[a-z']+|[A-Z]+(?![a-z])", word) if re.search(r"[a-z]{2}[A-Z][a-z]", word[1:]) else [word]


@dataclass(frozen=True, slots=True)
class _Item:
    """A word to be said, or a pause."""

    word: str
    """Empty for a pause."""
    mark: str
    end: int
    """Characters of the piece that have been spoken after it; words inside one written item share the last one's."""


def _items(piece: str, lexicon: Lexicon) -> list[_Item]:
    items: list[_Item] = []
    spoken = 0
    for match in _PIECE.finditer(piece):
        kind = match.lastgroup
        assert kind is not None
        if kind == "mark":
            mark = "…" if match[0].startswith("..") else _MARKS.get(match[0], ",")
            if items and not items[-1].mark:
                items.append(_Item("", mark, match.end()))
            elif items and mark in "!?." and items[-1].mark in ",;:":
                items[-1] = _Item("", mark, match.end())
            spoken = match.end()
            continue
        words = _read(kind, match[0], lexicon)
        if not words:
            continue
        items += [_Item(word, "", spoken) for word in words[:-1]]
        items.append(_Item(words[-1], "", match.end()))
        spoken = match.end()
        if (
            kind in {"initials", "abbreviation", "time"}
            and match[0].endswith(".")
            and not piece[spoken:].strip("\"')”’ ")
        ):
            items.append(_Item("", ".", spoken))  # "at 5 p.m." ends the sentence as well
    return items


def tokenize(piece: str, lexicon: Lexicon, *, base: int = 0, closed: bool = True) -> list[TextSegment]:
    """Tokens of one piece of text that starts at character `base` of the stream.

    closed: the piece ends a sentence, whether a mark says so or not; else another word follows.  Returns no segment
    where nothing can be said, and more than one where the piece is very long when read aloud.
    """
    items = _items(piece, lexicon)
    if not items or all(item.mark for item in items):
        return []
    if closed and not items[-1].mark:
        items.append(_Item("", ".", len(piece)))
    tokens: list[int] = []
    ends: list[int] = []
    breaks: list[int] = []  # where a word begins
    heard = 0
    group: list[_Item] = []
    for item in [*items, _Item("", "end", len(piece))]:
        if not item.mark:
            group.append(item)
            continue
        said = lexicon.say([word.word for word in group])
        for word, phonemes in zip(group, said, strict=True):
            sounds = letter_tokens(word.word) if phonemes is None else [token for token, _ in phoneme_tokens(phonemes)]
            if not sounds:
                continue
            if tokens:
                tokens.append(SPACE)
                ends.append(heard)
            breaks.append(len(tokens))
            tokens += sounds
            ends += [heard] * (len(sounds) - 1) + [word.end]
            heard = word.end
        group = []
        if item.mark != "end" and tokens:
            tokens.append(PUNCTUATION[item.mark])
            heard = item.end
            ends.append(heard)
    if not closed:
        tokens.append(SPACE)
        ends.append(len(piece))
    ends[-1] = len(piece)
    segments = []
    start = 0
    while start < len(tokens):
        stop = len(tokens)
        if stop - start > _MAX_TOKENS:
            stop = max((cut for cut in breaks if start < cut <= start + _MAX_TOKENS), default=start + _MAX_TOKENS)
        segments.append(TextSegment(tuple(tokens[start:stop]), tuple(base + end for end in ends[start:stop])))
        start = stop
    return segments


class Pronunciation:
    """What the front ends of all streams share: the lexicon."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon

    @classmethod
    def load(cls, folder: Path) -> Pronunciation:
        """From a voice's folder.  Raises CheckpointError where its lexicon is missing or broken."""
        path = folder / "lexicon.txt.gz"
        try:
            return cls(Lexicon.load(path))
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def frontend(self) -> EnglishFrontend:
        """A new stream's front end."""
        return EnglishFrontend(self.lexicon)


class EnglishFrontend:
    """One stream's text, cut into segments as it arrives.

    Where a cut falls depends on the text alone, never on how it was pushed.  A cut waits for the first character
    after it that can be spoken: only that tells "3." from "3.5" and keeps a closing quote or a smile with its
    sentence.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._text = ""
        """What has come and is in no segment yet."""
        self._base = 0
        """Characters of the stream before `_text`."""
        self._scanned = 0
        """Characters of `_text` that have been looked at."""
        self._mark = 0
        """Where the last sentence or clause mark before a space ends, 0 if none; a cut there waits for a word."""
        self._space = 0
        """Where the last space ends."""
        self._has_spoken = False

    def push(self, text: str) -> list[TextSegment]:
        """More text; return the segments that are complete now."""
        self._text += text
        segments: list[TextSegment] = []
        while (cut := self._next_cut()) is not None:
            is_clause = not self._mark or (
                self._text[self._mark - 1] in _CLAUSES and "\n" not in self._text[self._mark : cut]
            )
            segments += self._take(cut, closed=not is_clause)
        return segments

    def end(self) -> list[TextSegment]:
        """No more text; return what is left.  Raises nothing, whatever the text was."""
        length = len(self._text)
        segments = self._take(length, closed=True) if length else []
        if not segments and length and self._has_spoken:
            # Something unspeakable after the last sentence: a pause carries it, so that the text is heard to its end.
            return [TextSegment((PUNCTUATION["."],), (self._base,))]
        return segments

    def _take(self, cut: int, *, closed: bool) -> list[TextSegment]:
        segments = tokenize(self._text[:cut], self._lexicon, base=self._base, closed=closed)
        self._text = self._text[cut:]
        self._base += cut
        self._scanned = self._mark = self._space = 0
        self._has_spoken = self._has_spoken or bool(segments)
        return segments

    def _next_cut(self) -> int | None:
        """The next place to cut `_text`, or None until more of it has come."""
        text = self._text
        while self._scanned < len(text):
            index = self._scanned
            char = text[index]
            if self._mark and _is_speakable(char):
                if self._is_pause(index):
                    return index
                self._mark = 0
            if index >= _MAX_CHARS:
                return self._space or index
            self._scanned += 1
            if char.isspace():
                self._space = index + 1
                before = text[:index].rstrip("\"'”’)]} \t")
                if char == "\n" or (before and (before[-1] in _ENDS or before[-1] in _CLAUSES)):
                    self._mark = len(before) or self._mark
        return None

    def _is_pause(self, index: int) -> bool:
        """Whether speech pauses at the mark before the word that starts at `index`."""
        text = self._text[: self._mark]
        if "\n" in self._text[self._mark : index]:
            return True
        last = text[-1]
        if last in _CLAUSES:
            return index >= (_EARLY_CHARS if not self._has_spoken else _MAX_CHARS // 2)
        if last != ".":
            return True
        word = re.search(r"(\S+)\.$", text)
        if word is None:
            return True
        bare = word[1].lstrip("(\"'“‘")
        is_short = bare.lower() in _TITLES or bare.lower() == "no" or re.fullmatch(r"[A-Za-z](\.[A-Za-z])*|\d+", bare)
        return not is_short and not self._text[index].islower()


def _is_speakable(char: str) -> bool:
    if char.isascii():
        return char.isalnum() or char in "$&+=@%#"
    return char in "£€°" or (char.isalpha() and unicodedata.normalize("NFKD", char)[0].isascii())
