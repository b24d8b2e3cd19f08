"""`breeze-rtc demo · serve · call · console · say · voice · trace · doctor`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import wave
import webbrowser
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from breeze_rtc.clock import MS, SECOND, MonotonicClock
from breeze_rtc.errors import BadRequest, BadText, BadTrace, BreezeError
from breeze_rtc.options import (
    AgentFile,
    CarrierDoor,
    Cloning,
    Guests,
    Hearing,
    Listening,
    Port,
    Relays,
    Serving,
    SipCaller,
    SipDoor,
    Speaking,
    Telephony,
    Thinking,
    Trace,
    Verbose,
    Voice,
    Voices,
    Ways,
    callbacks,
    takes_groups,
)
from breeze_rtc.runtime import voice_folder

if TYPE_CHECKING:
    from breeze_rtc.runtime.engine import Engine
    from breeze_rtc.server.app import VoiceServer
    from breeze_rtc.server.phone import Phone

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Real-time voice agents with the text-to-speech engine inside.",
)
voice_app = typer.Typer(no_args_is_help=True, help="Clone voices, for models that can.")
app.add_typer(voice_app, name="voice")
trace_app = typer.Typer(no_args_is_help=True, help="Look at a run that was recorded with --trace.")
app.add_typer(trace_app, name="trace")
out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


@app.command()
@takes_groups
def demo(
    *,
    serving: Serving,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    trace: Trace = None,
    speaking: Speaking,
    thinking: Thinking,
    hearing: Listening,
) -> None:
    """Talk to an agent in the browser: no key, no download."""

    def ready(server: VoiceServer, url: str, _line: Phone | None) -> None:
        _say_where(server, url)
        if open_browser:
            _open(url)

    _serve(serving, speaking, thinking, hearing, ready=ready, trace=trace)


@app.command()
@takes_groups
def serve(
    agent_file: AgentFile = None,
    *,
    serving: Serving,
    record: Annotated[
        Path | None, typer.Option(help="Keep each call as a WAV file in this folder: the caller left, the agent right.")
    ] = None,
    trace: Trace = None,
    guests: Guests,
    speaking: Speaking,
    thinking: Thinking,
    hearing: Listening,
    ways: Ways,
    carriers: CarrierDoor,
    sip: SipDoor,
) -> None:
    """The same server without a browser: the page, POST /v1/audio/speech, /health and /metrics."""
    from breeze_rtc.server.carrier_api import carrier_apis

    ways.check()
    carriers.check()
    if record is not None:
        try:
            record.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest(f"cannot keep calls in {record}: {error.strerror}") from error
    door = sip.settings()
    apis = carrier_apis(os.environ) if carriers.phone else {}
    audio_socket = (serving.host, carriers.audiosocket_port) if carriers.audiosocket_port is not None else None

    def line(url: str) -> Phone:
        return carriers.phone_at(url, audio_socket=audio_socket, sip=door, apis=apis)

    def ready(server: VoiceServer, url: str, line: Phone | None) -> None:
        advice = []
        if carriers.phone and line is not None:
            advice.append(line.instructions(urlsplit(url).port or 80))
            if not carriers.key:
                to_keep = f"set {carriers.phone_key_env} to a secret to keep them"
                advice.append(f"The addresses are new at each start; {to_keep}.")
        elif door is not None:
            advice.append(f"By telephone, {door.instructions()}")
        _say_where(server, url, *advice)

    _serve(
        serving,
        speaking,
        thinking,
        hearing,
        agent_file=agent_file,
        line=line if carriers.phone or door is not None else None,
        ready=ready,
        trace=trace,
        accepts_voices=guests.accept_voices,
        recordings=record,
        max_calls=guests.max_calls,
        max_calls_per_address=guests.max_calls_per_address,
        ice=ways.servers(),
        relay_only=ways.relay_only,
        allowed_origins=guests.allowed_origin or (),
    )


@dataclass(frozen=True, slots=True)
class _Dial:
    """A telephone to call."""

    carrier: str
    to: str
    caller: str


@app.command()
@takes_groups
def call(
    agent_file: AgentFile = None,
    *,
    carrier: Annotated[
        str, typer.Option(help="twilio, telnyx, plivo or vonage, whose account is in the environment; or sip.")
    ],
    to: Annotated[str, typer.Option(help="The number to call, e.g. +4930123456; by SIP also sip:NAME@HOST.")],
    caller: Annotated[
        str | None, typer.Option("--from", help="The number to call from, one of your account; not by SIP.")
    ] = None,
    carrier_url: Annotated[
        str | None, typer.Option(help="Where the carrier's REST interface is, if not at the carrier's own address.")
    ] = None,
    serving: Serving,
    speaking: Speaking,
    thinking: Thinking,
    hearing: Listening,
    telephony: Telephony,
    sip: SipCaller,
) -> None:
    """Call a telephone and let an agent talk to whoever answers, until one of the two hangs up."""
    from breeze_rtc.server.carrier_api import carrier_api

    is_sip = carrier == "sip"
    if not is_sip and (caller is None or telephony.phone_url is None):
        raise BadRequest(f"a call by {carrier} needs --from, a number of the account, and --phone-url, where we are")
    apis = {} if is_sip else {carrier: carrier_api(carrier, os.environ, base_url=carrier_url)}
    door = sip.door(sip.sip) if is_sip else None
    _serve(
        serving,
        speaking,
        thinking,
        hearing,
        agent_file=agent_file,
        line=lambda url: telephony.phone_at(url, sip=door, apis=apis),
        dial=_Dial(carrier, to, caller or ""),
        max_calls=2,  # The other one so that a number that is called back is not simply dead.
    )


def _serve(
    serving: Serving,
    speaking: Speaking,
    thinking: Thinking,
    hearing: Listening,
    *,
    agent_file: Path | None = None,
    line: Callable[[str], Phone] | None = None,
    dial: _Dial | None = None,
    ready: Callable[[VoiceServer, str, Phone | None], None] = lambda server, url, line: None,
    trace: Path | None = None,
    **options: Any,
) -> None:
    """Serve until Ctrl-C, or until the call that is placed is over.

    line: makes the telephone, given the page's address.  dial: whom to call.  ready: gets server, page's address and
    telephone once all is loaded.  options: VoiceServer's.
    """
    from breeze_rtc.server import app as door
    from breeze_rtc.server.agent import read_agent

    _log(serving.verbose)
    thinking.check()
    given = read_agent(agent_file).callbacks if agent_file is not None else None
    if given is not None and (serving.voice, thinking) != (None, Thinking()):
        raise BadRequest(f"{agent_file} chooses its voice and its model itself; leave out --voice and --llm-...")

    async def hold(address: socket.socket) -> None:
        async with AsyncExitStack() as stack:
            chat = thinking.chat(stack) if given is None else None
            if chat is not None:
                await stack.enter_async_context(chat)
            url = door.page_url(serving.host, address.getsockname()[1])
            phone = line(url) if line is not None else None
            server = door.VoiceServer(
                given or callbacks(chat, serving.voice),
                engine=speaking.engine(trace=trace, measures=True),
                listens=hearing.listen,
                recogniser=hearing.ears,
                phone=phone,
                on_ready=lambda server: ready(server, url, phone),
                **options,
            )
            bars = stack.enter_context(_StartBars())
            server.engine.on_loading, server.engine.on_measuring = bars.loading, bars.measuring
            if dial is None:
                await door.serve(server, address)
            else:
                async with door.serving(server, address):
                    out.print(f"Calling {dial.to}. Press Ctrl-C to hang up.", markup=False)
                    out.print(f"The call is over: {await server.dial(dial.carrier, dial.to, caller=dial.caller)}")

    with ExitStack() as stack:
        address = stack.enter_context(closing(door.listen(serving.host, serving.port)))
        out.print(f"Loading the voice ({speaking.model})", markup=False)
        runner = stack.enter_context(asyncio.Runner(loop_factory=door.loop_factory()))
        runner.run(hold(address))


def _say_where(server: VoiceServer, url: str, *advice: str) -> None:
    out.print(server.engine.summary, markup=False)
    out.print(f"Talk to the agent at {url}", style="bold")
    if server.listen_fix:
        out.print(f"{server.listen_fix.rstrip('.')}; until then, type.", markup=False)
    for line in advice:
        out.print(line, markup=False)
    out.print("Press Ctrl-C to stop.")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )


class _StartBars:
    """A bar for each thing that takes long when an engine starts; none for what need not be done."""

    def __init__(self) -> None:
        self._progress = _progress()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()

    def measuring(self, share: float) -> None:
        self.loading("Finding out how fast this machine is, once", share)

    def loading(self, what: str, share: float) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=1.0)
            self._progress.start()
        self._progress.update(self._tasks[what], completed=share)
        if share >= 1:
            self._progress.remove_task(self._tasks.pop(what))
            self._progress.stop()


def _open(url: str) -> None:
    # A thread: some browsers' launchers wait until the browser is closed.
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


@app.command()
@takes_groups
def console(
    *,
    text: Annotated[bool, typer.Option("--text", help="Type, without microphone and loudspeaker.")] = False,
    voice: Voice = None,
    verbose: Verbose = False,
    speaking: Speaking,
    thinking: Thinking,
    hearing: Hearing,
) -> None:
    """Talk to an agent in this terminal, by this machine's microphone and loudspeaker or by typing."""
    from breeze_rtc import console as door

    _log(verbose)
    thinking.check()
    with ExitStack() as stack:
        agent = callbacks(thinking.chat(stack), voice)
        door.run(agent, text=text, engine=speaking.engine(), recogniser=hearing.ears)


@app.command()
@takes_groups
def say(
    text: Annotated[str, typer.Argument(help='What to say; "-" reads it from standard input.')],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The WAV file to write.")] = Path("speech.wav"),
    voice: Voice = None,
    instruction: Annotated[str, typer.Option(help="How to speak, in words; of models that read it.")] = "",
    language: Annotated[str, typer.Option(help="Of the text, such as German; of models that are told.")] = "",
    seed: Annotated[int | None, typer.Option(help="The same seed and text give the same sound.")] = None,
    verbose: Verbose = False,
    speaking: Speaking,
) -> None:
    """Speak into a WAV file; works offline."""
    _log(verbose)
    if text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise BadText("there is nothing to say: the text is empty")
    if not output.parent.is_dir():
        raise BadRequest(f"there is no folder {output.parent}; make it, or choose another with -o")
    if output.is_dir():
        raise BadRequest(f"{output} is a folder; name a file with -o")
    asyncio.run(
        _say(speaking.engine(), text, output, voice=voice, instruction=instruction, language=language, seed=seed)
    )


async def _say(
    engine: Engine, text: str, output: Path, *, voice: str | None, instruction: str, language: str, seed: int | None
) -> None:
    from breeze_rtc.scheduling.stream import Priority

    clock = MonotonicClock()
    with _progress() as progress:
        loading = progress.add_task("Loading the voice", total=None)
        async with engine:
            progress.remove_task(loading)
            speaking = progress.add_task("Speaking", total=len(text))
            began_at = clock.now()
            first_at: int | None = None
            pcm = bytearray()
            speech = engine.speak(
                voice=voice,
                instruction=instruction,
                language=language,
                seed=seed,
                priority=Priority.BATCH,
                interactive=False,
            )
            speech.push(text)
            speech.end()
            async for chunk in speech:
                first_at = clock.now() if first_at is None else first_at
                pcm += chunk.pcm
                if chunk.marks:
                    progress.update(speaking, completed=chunk.marks[-1].chars)
            took_s = (clock.now() - began_at) / SECOND
            sample_rate = engine.sample_rate
    if not pcm or first_at is None:
        raise BadText("nothing in this text can be spoken")
    try:
        with wave.open(str(output), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate)
            file.writeframes(bytes(pcm))
    except OSError as error:
        raise BadRequest(f"cannot write {output}: {error.strerror}") from error
    seconds = len(pcm) / 2 / sample_rate
    out.print(
        f"{output}: {seconds:.2f} s of speech in {took_s:.2f} s "
        f"(real-time factor {took_s / seconds:.2f}), first sound after {(first_at - began_at) / 1e6:.0f} ms",
        markup=False,
    )


@voice_app.command()
@takes_groups
def add(
    name: Annotated[str, typer.Argument(help="What the voice shall be called: a-z, 0-9, - and _.")],
    recording: Annotated[Path, typer.Argument(help="1 to 30 s of one voice: WAV, FLAC, Ogg, MP3.")],
    *,
    transcript: Annotated[
        str, typer.Option(help="The words that are said in it, exactly; Qwen3-TTS Base can do without.")
    ] = "",
    speaking: Cloning,
) -> None:
    """Clone the voice of a recording, in place of one of that name.

    A server that uses the folder has it at once.
    """
    voice_folder.check(name, transcript)
    try:
        data = recording.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read {recording}: {error.strerror}") from error

    async def make() -> None:
        with _progress() as progress:
            progress.add_task("Making the voice", total=None)
            async with speaking.engine() as engine:
                await engine.add_voice(name, data, transcript)

    asyncio.run(make())
    out.print(f"{speaking.folder / name}: speak with it by --voice {name}", markup=False)


@voice_app.command("list")
def list_voices(*, voices: Voices = None) -> None:
    """The cloned voices."""
    folder = voices or voice_folder.default_folder()
    found = voice_folder.names(folder)
    for name in found:
        out.print(name, markup=False)
    if not found:
        err.print(f"no cloned voice in {folder}; make one: breeze-rtc voice add NAME recording.wav", markup=False)


@voice_app.command()
def remove(name: Annotated[str, typer.Argument()], *, voices: Voices = None) -> None:
    """Delete a cloned voice."""
    voice_folder.remove(voices or voice_folder.default_folder(), name)


@trace_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="What --trace has written.", exists=True, dir_okay=False)],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("timeline.html"),
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Draw a recorded run: every step and why it was chosen, every stream against its listener's deadline.

    The run is replayed through the scheduler; the page holds all it needs and can be sent to somebody.
    """
    from breeze_rtc.scheduling.timeline import Timeline
    from breeze_rtc.timeline_page import page

    try:
        with err.status("Replaying"), file.open(encoding="utf-8") as lines:
            timeline = Timeline(lines)
    except OSError as error:
        raise BadRequest(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadTrace(str(file), "it is not text") from error
    except ValueError as error:
        raise BadTrace(str(file), str(error)) from error
    try:
        output.write_text(page(timeline, file.name), encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write {output}: {error.strerror}") from error
    summary = timeline.summary()
    first = "nobody spoke"
    if summary.first_sound_p50_ns is not None and summary.first_sound_p95_ns is not None:
        first = (
            f"first packet {summary.first_sound_p50_ns / MS:.0f} / {summary.first_sound_p95_ns / MS:.0f} ms (p50 / p95)"
        )
    out.print(
        f"{output}: {summary.streams} streams ({summary.refused} refused), {summary.steps} steps, {first}, "
        f"{summary.missed} missed deadlines, machine busy {summary.busy:.0%}",
        markup=False,
    )
    if open_browser:
        webbrowser.open(output.resolve().as_uri())


@app.command()
@takes_groups
def doctor(
    *,
    port: Port = 8000,
    model: Annotated[str, typer.Option(help="The model to look for, as `serve` takes it.")] = "nano",
    relays: Relays,
) -> None:
    """Look at this machine: what works, and what to do about the rest."""
    from breeze_rtc.server import doctor as checks

    table = Table(show_header=True, header_style="bold")
    for name in ("", "part", "found", "what to do"):
        table.add_column(name, overflow="fold")
    findings = checks.look(model=model, port=port, ice=relays.servers())
    for finding in findings:
        mark = "[green]ok[/]" if finding.works else "[yellow]optional[/]" if finding.is_optional else "[red]no[/]"
        table.add_row(mark, finding.part, escape(finding.found), escape(finding.fix))
    out.print(table)
    if any(not finding.works and not finding.is_optional for finding in findings):
        raise typer.Exit(1)


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """The command's entry: what a user can put right is one sentence and exit code 2, never a traceback.

    Exit code 1 is for what was looked at and found wanting: a machine by `doctor`, a trace by `trace show`.
    """
    try:
        app()
    except BreezeError as error:
        err.print(f"error: {error}", markup=False)
        raise SystemExit(1 if isinstance(error, BadTrace) else 2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
