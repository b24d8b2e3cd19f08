"""The agent as its author writes it: three decorators and two doors."""

from __future__ import annotations

import inspect
import logging
import runpy
import sys
import webbrowser
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breeze_rtc import console
from breeze_rtc.agent.session import Callbacks, OnDtmf, OnEnter, OnInterrupted, OnUserTurn, Recovery
from breeze_rtc.agent.text import SpokenText, TextFilter
from breeze_rtc.agent.tools import Tool, ToolFunction
from breeze_rtc.agent.turns import TurnTaking
from breeze_rtc.agent.waiting import Waiting
from breeze_rtc.errors import BadRequest, BreezeError
from breeze_rtc.server import app as door
from breeze_rtc.server.app import VoiceServer

if TYPE_CHECKING:
    from breeze_rtc.testing import Caller


log = logging.getLogger(__name__)

_is_being_read: ContextVar[bool] = ContextVar("is_being_read", default=False)


class Agent:
    """A voice agent.

        agent = Agent()

        @agent.on_user_turn
        async def reply(session, turn):
            yield f"You said: {turn.text}"

        agent.run()

    Callbacks are async generators of text; each `yield` returns when the listener is near enough to hear more, and a
    barge-in closes the generator (`finally` runs).  A plain coroutine that calls `session.say(...)` will do too.
    """

    def __init__(
        self,
        voice: str | None = None,
        *,
        turn_taking: TurnTaking | None = None,
        recovery: Recovery | None = None,
        waiting: Waiting | None = None,
        text_filter: Callable[[], TextFilter] | None = SpokenText,
    ) -> None:
        """voice: a name the model knows; its first by default.  turn_taking: when the agent holds its breath, is
        interrupted, and answers.  recovery: what the caller hears when something fails.  waiting: what fills a long
        silence before an answer.  text_filter: makes what reads markup, emoji and links out (`agent.text`), one for
        each speech; None: text is spoken as it is."""
        self.callbacks = Callbacks(
            voice=voice,
            text_filter=text_filter,
            turn_taking=turn_taking or TurnTaking(),
            recovery=recovery or Recovery(),
            waiting=waiting,
        )

    def on_enter(self, callback: OnEnter) -> OnEnter:
        """`async def f(session)`: the call begins; what it yields is spoken first.

        Raises TypeError for what cannot be called so, as the other three.
        """
        _check(callback, "session")
        self.callbacks.on_enter = callback
        return callback

    def on_user_turn(self, callback: OnUserTurn) -> OnUserTurn:
        """`async def f(session, turn)`: the user said or typed `turn.text`."""
        _check(callback, "session", "turn")
        self.callbacks.on_user_turn = callback
        return callback

    def on_interrupted(self, callback: OnInterrupted) -> OnInterrupted:
        """`async def f(session, speech)`: `speech` was cut off after `speech.heard_text`."""
        _check(callback, "session", "speech")
        self.callbacks.on_interrupted = callback
        return callback

    def on_dtmf(self, callback: OnDtmf) -> OnDtmf:
        """`async def f(session, digit)`: the caller pressed a key of the telephone."""
        _check(callback, "session", "digit")
        self.callbacks.on_dtmf = callback
        return callback

    def tool(self, function: ToolFunction) -> ToolFunction:
        """A function that the language model may call (`session.tools`): see `agent.tools.Tool` for what it may take.

        Raises BadTool.
        """
        tool = Tool(function)
        self.callbacks.tools[tool.name] = tool
        return function

    def test(self, **options: Any) -> Caller:
        """A simulated call: `async with agent.test() as caller`; `options` are `breeze_rtc.testing.Caller`'s."""
        from breeze_rtc.testing import Caller

        return Caller(self.callbacks, **options)

    def mount(self, app: Any, **options: Any) -> VoiceServer:
        """Add the page, the call and the API to a Starlette or FastAPI `app`; `options` are VoiceServer's."""
        server = VoiceServer(self.callbacks, **options)
        door.mount(server, app)
        return server

    def console(self, *, text: bool = False, **options: Any) -> None:
        """Talk to this agent in the terminal, by microphone and loudspeaker, or by `text` alone; `options` are
        `console.run`'s."""
        console.run(self.callbacks, text=text, **options)

    def run(self, *, host: str = "127.0.0.1", port: int = 8000, open_browser: bool = False, **options: Any) -> None:
        """Serve this agent until Ctrl-C, and print where; `options` are VoiceServer's.

        `python agent.py console` talks in the terminal instead, and `python agent.py console --text` by typing alone.
        What keeps it from starting ends the program with a sentence: a port in use, a model that is not there.
        """
        if _is_being_read.get():
            raise _Ran(self, sorted(options))
        try:
            if sys.argv[1:2] == ["console"]:
                self.console(text="--text" in sys.argv[2:])
                return
            with closing(door.listen(host, port)) as address:
                url = door.page_url(host, address.getsockname()[1])

                def ready(server: VoiceServer) -> None:
                    print(f"Talk to the agent at {url}")
                    if server.listen_fix:
                        print(server.listen_fix)
                    if open_browser:
                        webbrowser.open(url)

                door.run(VoiceServer(self.callbacks, on_ready=ready, **options), address)
        except BreezeError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(130)  # as a shell says it; what was open is closed


def _check(callback: Callable[..., Any], *names: str) -> None:
    """A TypeError where the callback stands, instead of an apology in the first call."""
    shape = f"async def f({', '.join(names)})"
    if not callable(callback):
        raise TypeError(f"a callback is a function, `{shape}`, not {type(callback).__name__}")
    if inspect.isgeneratorfunction(callback):
        raise TypeError(f"{callback.__name__} yields, but is no `async def`; write it as `{shape}`")
    try:
        inspect.signature(callback).bind(*names)
    except TypeError as error:
        raise TypeError(f"{callback!r} is called with {' and '.join(names)}; write it as `{shape}` ({error})") from None
    except ValueError:  # what is not written in Python may not tell
        pass


class _Ran(BaseException):
    """A file that is only read has come to `agent.run()`."""

    def __init__(self, agent: Agent, options: list[str]) -> None:
        super().__init__(agent, options)
        self.agent = agent
        self.options = options


def read_agent(path: Path) -> Agent:
    """The agent of a Python file: the one that it runs, or else the only one that it makes.  Raises `BadRequest`."""
    if not path.is_file():
        raise BadRequest(f"there is no file {path}")
    token = _is_being_read.set(True)
    try:
        names = runpy.run_path(str(path))
    except _Ran as ran:
        if ran.options:
            log.warning("%s gives agent.run(...) %s, which this command does not take", path, ", ".join(ran.options))
        return ran.agent
    finally:
        _is_being_read.reset(token)
    agents = {id(value): value for value in names.values() if isinstance(value, Agent)}
    if len(agents) != 1:
        raise BadRequest(f"{path} makes {len(agents) or 'no'} agents; it has to make one: agent = Agent()")
    return next(iter(agents.values()))
