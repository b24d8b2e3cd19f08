"""Sentences to train on: WordNet's example sentences and definitions, and what a voice agent says.

Everything is English letters, apostrophes and plain punctuation: numbers are spelled, so that the
words here and the words the text front end makes at run time are the same words.
"""

# ruff: noqa: SIM905  (lists of words and sentences read better as text)

from __future__ import annotations

import random
import re
from pathlib import Path

import inflect

WORDNET = Path("/usr/share/wordnet")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z' ,;:.!?-]*[A-Za-z.!?]")
_COARSE = ("obscenity", "ethnic_slur", "disparagement", "vulgarism", "dysphemism")

_NAMES = """
Alice Ben Carla David Emma Frank Grace Henry Isabel Jack Karen Leo Maria Nathan Olivia Peter Quinn Rachel Sam
Tina Victor Wendy Yusuf Zoe Anna Brian Chloe Daniel Elena George Hannah James Julia Kevin Laura Michael Nora
Oscar Paula Robert Sophie Thomas Ursula William""".split()
_SURNAMES = """
Smith Johnson Brown Taylor Miller Wilson Moore Anderson Jackson White Harris Martin Thompson Garcia Clark Lewis
Walker Hall Young King Wright Hill Green Baker Nelson Carter Mitchell Roberts Turner Phillips Parker Evans
Collins Stewart Morris Murphy Cook Rogers Morgan Cooper Peterson Reed Bailey Bell Kelly Howard Ward Cox
Richardson""".split()
_CITIES = """
London Paris Berlin Madrid Rome Vienna Dublin Oslo Chicago Boston Seattle Denver Houston Dallas Atlanta Toronto
Sydney Tokyo Lisbon Prague Amsterdam Portland Austin Miami Phoenix Geneva Zurich Milan Athens Cairo Mumbai
Singapore Melbourne Vancouver Edinburgh Manchester Brooklyn Oakland""".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()
_ROOMS = "kitchen,bedroom,living room,hallway,garage,garden,office,bathroom,basement,dining room".split(",")
_DEVICES = "lights,heating,television,alarm,music,fan,oven,radio,printer,camera,front door,thermostat".split(",")
_DISHES = """
pizza,a salad,two burgers,chicken soup,green tea,a large coffee,orange juice,fried rice,apple pie,
a cheese sandwich,pasta with tomato sauce,grilled salmon,a glass of water,vanilla ice cream,pancakes""".replace(
    "\n", ""
).split(",")
_PRODUCTS = "order,package,ticket,invoice,account,subscription,reservation,payment,refund,laptop,phone,insurance".split(
    ","
)
_WEATHER = "sunny,cloudy,rainy,windy,foggy,cold and clear,warm and dry,stormy,icy,mild".split(",")
_PLACES = "airport,station,library,hospital,museum,bank,post office,hotel,restaurant,theater,market,school".split(",")

_FIXED = """
Yes.|No.|Okay.|Sure.|Thanks.|Thank you.|Hello.|Hi.|Hi there.|Hello there!|Goodbye.|Bye.|Of course.|All right.|
Got it.|I see.|Right.|Great.|Good.|Perfect.|Sorry.|Sorry about that.|Excuse me.|Please wait.|One moment.|
One moment, please.|Just a second.|Let me check.|Let me think.|Good question.|No problem.|You're welcome.|
My pleasure.|Welcome back.|How are you?|How can I help?|How can I help you today?|What can I do for you?|
Anything else?|Is there anything else?|Are you still there?|Can you hear me?|Could you repeat that?|
Could you say that again?|I'm listening.|I'm here.|I don't know.|I'm not sure.|Good morning.|Good morning!|
Good afternoon.|Good evening.|Good night.|See you later.|See you soon.|Take care.|Have a nice day.|
Have a great day!|Go ahead.|Exactly.|Absolutely.|That's right.|That's correct.|That is wrong.|Well done.|
Not yet.|Maybe.|Maybe later.|Never mind.|Done.|Ready.|Stop.|Stopped.|Okay, stopping.|What?|Why?|Why not?|Who?|
When?|Where?|How?|Really?|Interesting.|Wonderful!|Congratulations!|Nice to meet you.|It's nice to meet you.|
I heard you.|I can hear you.|I can hear you loud and clear.|I am a voice agent.|
I'm a computer, so I don't sleep.|You can interrupt me at any time.|Tell me more.|Go on.|Keep going.|
What happened next?|Ask me anything.|Say something, and I will say it back.|Try saying something.|
Try to interrupt me.""".replace("\n", "").split("|")

_TEMPLATES = """
You said: {phrase}.|You said, {phrase}.|I heard you say: {phrase}.|Did you say, {phrase}?|
Hello {name}, how are you today?|Hi {name}, this is {name} from the {place}.|Good morning, {name}.|
Good evening, {name} {surname}.|My name is {name} {surname}.|May I speak to {name} {surname}?|Is this {name}?|
{name} called you at {time}.|It is {time}.|The time is {time}.|It's {time} in {city}.|
Your appointment is on {day} at {time}.|Shall we say {day}, {month} {ordinal}, at {time}?|
I can offer you {day} at {time} or {day} at {time}.|The meeting starts at {time} and ends at {time}.|
Your train to {city} leaves at {time} from platform {small}.|
The flight from {city} to {city} takes about {small} hours and {tens} minutes.|
Gate {small}, boarding at {time}.|It will be {weather} in {city} on {day}, with a high of {tens} degrees.|
Today is {weather} and {weather}.|Tomorrow looks {weather}, about {tens} degrees.|
The temperature in the {room} is {tens} degrees.|I turned on the {device} in the {room}.|
I turned off the {device}.|Should I turn off the {device} in the {room}?|
Okay, the {device} will start at {time}.|The {device} in the {room} is already on.|
I set a timer for {tens} minutes.|Your timer for {small} minutes is done.|You have {small} new messages.|
You have {count} unread messages and {small} missed calls.|Your {product} number is {digits}.|
The code is {digits}.|Let me repeat: {digits}.|Please call {digits}.|Your {product} will arrive on {day}.|
Your {product} was sent on {month} {ordinal}.|Your {product} costs {money}.|The total is {money}.|
That comes to {money}, including tax.|The balance of your {product} is {money}.|
I found {count} results for {phrase}.|Here is what I found about the {noun}.|
{count} people live near the {noun}.|The answer is {count}.|{count} plus {count} is {count}.|
{small} times {small} is {count}.|About {tens} percent of the {noun} is gone.|Would you like {dish} or {dish}?|
I would like {dish}, please.|So that's {dish} and {dish}, right?|We also have {dish}.|
A table for {small} on {day} at {time}, under the name {surname}.|The {place} closes at {time}.|
The {place} is {small} miles from here, on the left.|
Turn right at the {place}, then go straight for {small} minutes.|Take the second exit toward the {place}.|
The nearest {place} is in {city}.|I'm sorry, I didn't catch that.|I'm sorry, {name}, I can't do that.|
Sorry, I did not find any {noun}.|I think the {noun} is {adjective}.|
The {noun} was {adjective}, but the {noun} was not.|Is the {noun} {adjective}?|
Why is the {noun} so {adjective}?|What does {noun} mean?|How do you spell {noun}?|
Do you want the {adjective} {noun} or the {adjective} one?|First, take the {noun}; then, find the {noun}.|
A {noun}, a {noun}, and a {noun}.|{adjective}, {adjective} and {adjective}.|The word is {noun}.|{noun}.|
{phrase}?|{phrase}!|Well, {phrase}.|Yes, {phrase}.|No, {phrase}.|Okay, {phrase}.|
Once there was a {adjective} {noun} who lived near {city}.|In {year}, the {noun} moved to {city}.|
{name} was born on {month} {ordinal}, {year}.|It happened in {month} {year}.|I'll remind you on {day}.|
{name} and {name} are going to {city} in {month}.|Do you know where {name} is?|
Has {name} seen the {adjective} {noun}?|Let me look that up for you. It may take {small} seconds.|
Please say your {product} number.|Press {small} for {noun}.|You can say {noun}, {noun}, or {noun}.|
I have booked {dish} for {name}.|Thank you for calling, {name}.|
It is spelled {letters}.|{surname} is spelled {letters}.|The code is {letters}, {digits}.|{letters}.|
Was that {letters}?|How many {noun} do you need, {small} or {tens}?|Who called at {time} on {day}?|
On {month} {ordinal}, {year}, {count} people saw the {noun}, and {phrase}.""".replace("\n", "").split("|")


def _words(number: int | str, engine: inflect.engine) -> str:
    return str(engine.number_to_words(number)).replace("-", " ").replace(",", "")


class Sentences:
    """An endless, seeded stream of sentences; the same seed gives the same ones."""

    def __init__(self, *, seed: int, held_out: frozenset[str] = frozenset()) -> None:
        self._random = random.Random(seed)
        self._held_out = held_out
        self._numbers = inflect.engine()
        self.examples, self.definitions, self.nouns, self.adjectives = _read_wordnet()
        for texts in (self.examples, self.definitions):
            self._random.shuffle(texts)

    def take(self, count: int) -> list[str]:
        """Mix of kinds, no sentence twice, none that is held out."""
        pick = self._random
        texts: dict[str, None] = dict.fromkeys(_FIXED)
        examples, definitions = iter(self.examples), iter(self.definitions)
        while len(texts) < count:
            kind = pick.random()
            text = next(examples, None) if kind < 0.52 else next(definitions, None) if kind < 0.64 else None
            text = self._fill(pick.choice(_TEMPLATES)) if text is None else self._close(text)
            if 2 <= len(text) <= 170 and plain_key(text) not in self._held_out:
                texts[text] = None
        result = list(texts)
        pick.shuffle(result)
        return result

    def _close(self, text: str) -> str:
        text = text[0].upper() + text[1:]
        return text if text[-1] in ".!?" else text + ("." if self._random.random() < 0.97 else "!")

    def _fill(self, template: str) -> str:
        text = re.sub(r"\{(\w+)\}", lambda match: self._slot(match.group(1)), template)
        return text[0].upper() + text[1:]

    def _slot(self, name: str) -> str:
        pick = self._random
        match name:
            case "phrase":
                return pick.choice(self.examples).rstrip(".!?")
            case "noun" | "adjective":
                return pick.choice(self.nouns if name == "noun" else self.adjectives)
            case "small":
                return _words(pick.randint(1, 12), self._numbers)
            case "tens":
                return _words(pick.randint(5, 99), self._numbers)
            case "count":
                return _words(int(10 ** pick.uniform(0.5, 6.5)), self._numbers)
            case "ordinal":
                return _words(str(self._numbers.ordinal(pick.randint(1, 31))), self._numbers)
            case "year":
                century, rest = pick.choice([18, 19, 19, 20]), pick.randint(10, 99)
                return f"{_words(century, self._numbers)} {_words(rest, self._numbers)}"
            case "digits":
                groups = [
                    [_words(pick.randint(0, 9), self._numbers) for _ in range(pick.randint(2, 4))]
                    for _ in range(pick.randint(1, 3))
                ]
                return ", ".join(" ".join(group) for group in groups)
            case "letters":
                return ", ".join(pick.choices("abcdefghijklmnopqrstuvwxyz", k=pick.randint(2, 6)))
            case "money":
                cents = pick.choice(["", "", f" and {_words(pick.randint(5, 99), self._numbers)} cents"])
                return f"{_words(pick.randint(2, 999), self._numbers)} dollars{cents}"
            case "time":
                odd = f" {_words(pick.randint(10, 59), self._numbers)}"
                minutes = pick.choice(["", " thirty", " fifteen", " forty five", " oh five", odd])
                hour = _words(pick.randint(1, 12), self._numbers)
                return hour + minutes + pick.choice(["", " a m", " p m", "" if minutes else " o'clock"])
        lists = {
            "name": _NAMES,
            "surname": _SURNAMES,
            "city": _CITIES,
            "day": _DAYS,
            "month": _MONTHS,
            "room": _ROOMS,
            "device": _DEVICES,
            "dish": _DISHES,
            "product": _PRODUCTS,
            "weather": _WEATHER,
            "place": _PLACES,
        }
        return pick.choice(lists[name])


def plain_key(text: str) -> str:
    """What two sentences share when they sound the same: letters and single spaces."""
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower()).split())


def _read_wordnet() -> tuple[list[str], list[str], list[str], list[str]]:
    """Example sentences, definitions, nouns and adjectives; synsets marked as coarse are left out."""
    lines = {
        kind: [line for line in (WORDNET / f"data.{kind}").read_text("latin-1").splitlines() if line[0] != " "]
        for kind in ("noun", "verb", "adj", "adv")
    }
    coarse = {line[:8] for line in lines["noun"] if any(f" {word} 0 " in line[:200] for word in _COARSE)}
    examples: dict[str, None] = {}
    definitions: dict[str, None] = {}
    words: dict[str, dict[str, None]] = {"noun": {}, "adj": {}}
    for kind, kind_lines in lines.items():
        for line in kind_lines:
            synset, _, gloss = line.partition(" | ")
            if any(f"{pointer} {offset}" in synset for offset in coarse for pointer in (";u", "-u")):
                continue
            for text in re.findall(r'"([^"]+)"', gloss):
                if _PLAIN.fullmatch(text) and 8 <= len(text) <= 150:
                    examples[text] = None
            definition = gloss.split(";")[0].split('"')[0].strip()
            if kind != "noun" and _PLAIN.fullmatch(definition) and 12 <= len(definition) <= 110:
                definitions[definition] = None
            if kind in words:
                for word in synset.split()[4:-1:1]:
                    if re.fullmatch(r"[a-z]{3,12}", word):
                        words[kind][word] = None
                        break
    return list(examples), list(definitions), list(words["noun"]), list(words["adj"])
