"""The page that draws a recorded run: one HTML file with its style, its scripts and the run inside.

It asks the network for nothing, so it can be kept beside the trace or sent to somebody.
"""

from __future__ import annotations

import json
from importlib.resources import files

from breeze_rtc.scheduling.timeline import Timeline

SCRIPTS = ("data.js", "view.js", "drawing.js", "panel.js", "hands.js")
"""They are joined to one, in this order."""


def page(timeline: Timeline, name: str) -> str:
    """The page of a run that is called `name`."""
    folder = files(__package__)

    def text(file: str) -> str:
        return folder.joinpath(file).read_text(encoding="utf-8")

    values = json.dumps({"name": name, **timeline.data()}, separators=(",", ":"), allow_nan=False)
    # JSON inside of a page must not end its script element.
    values = values.replace("<", "\\u003c")
    html = text("page.html").replace("__STYLE__", text("style.css"))
    html = html.replace("__SCRIPTS__", "\n".join(text(script) for script in SCRIPTS))
    return html.replace("__TIMELINE__", values)
