"""What telephone carriers do by REST, each asked through its own library: place a call, put it through, press keys.

| carrier | extra | environment |
| --- | --- | --- |
| twilio | phone | TWILIO_ACCOUNT_SID, TWILIO_AUTH_TOKEN |
| telnyx | telnyx | TELNYX_API_KEY; to place calls TELNYX_CONNECTION_ID, a Voice API application |
| plivo | plivo | PLIVO_AUTH_ID, PLIVO_AUTH_TOKEN |
| vonage | vonage | VONAGE_APPLICATION_ID, VONAGE_PRIVATE_KEY (the key, or its file) |

The libraries wait for their answers, so they are asked on a thread.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from breeze_rtc.errors import BadRequest, CarrierRefused, LineCannot, MissingExtra

TIMEOUT_S = 10
RING_S = 45
"""How long a telephone rings before its carrier gives up."""


class CarrierApi(Protocol):
    """One account at one carrier.  `call` is the carrier's name of a call.  All raise `CarrierRefused`."""

    presses_keys: bool
    """Whether it has `send_dtmf`."""

    async def dial(self, to: str, caller: str, *, webhook: str, socket: str) -> str:
        """Place a call from the account's number `caller`; returns its name at once, while it rings.

        webhook, socket: where the carrier learns what to do with the call, and where it is to be streamed.
        """

    async def state(self, call: str) -> str:
        """How far a call that was placed is, in the carrier's words; "" where it does not say."""

    async def hang_up(self, call: str) -> None:
        """End a call, or its ringing."""

    async def transfer(self, call: str, to: str, *, webhook: str) -> None:
        """Connect the caller with another number in our place; the stream ends."""

    async def send_dtmf(self, call: str, keys: str) -> None:
        """Press keys: 0 to 9, *, #."""


OVER = (
    "busy",
    "no-answer",
    "failed",
    "canceled",
    "cancelled",
    "completed",
    "rejected",
    "timeout",
    "unanswered",
    "over",
)
"""States in which a call that has not begun never will."""


class TwilioApi:
    """https://www.twilio.com/docs/voice/api/call-resource"""

    presses_keys = False
    """Only `<Play digits>` of TwiML does, in place of the stream."""

    def __init__(self, account_sid: str, auth_token: str, *, base_url: str | None = None) -> None:
        from requests import RequestException
        from twilio.base.exceptions import TwilioException
        from twilio.http.http_client import TwilioHttpClient
        from twilio.rest import Client

        http = TwilioHttpClient(timeout=TIMEOUT_S)
        _send_to(http.session, base_url)
        self._client = Client(account_sid, auth_token, http_client=http)
        self._errors = (TwilioException, RequestException)

    async def dial(self, to: str, caller: str, *, webhook: str, socket: str) -> str:
        call = await self._ask(lambda: self._client.calls.create(to=to, from_=caller, url=webhook, timeout=RING_S))
        return str(call.sid)

    async def state(self, call: str) -> str:
        return str((await self._ask(lambda: self._client.calls(call).fetch())).status)

    async def hang_up(self, call: str) -> None:
        await self._ask(lambda: self._client.calls(call).update(status="completed"))

    async def transfer(self, call: str, to: str, *, webhook: str) -> None:
        number = f"<Sip>{escape(to)}</Sip>" if to.startswith("sip") else escape(to)
        twiml = f"<Response><Dial>{number}</Dial></Response>"
        await self._ask(lambda: self._client.calls(call).update(twiml=twiml))

    async def send_dtmf(self, call: str, keys: str) -> None:
        raise LineCannot("pressing keys by REST", "Twilio plays them in place of the stream; press them in the sound")

    async def _ask(self, do: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(do)
        except self._errors as error:
            status, detail = getattr(error, "status", None), getattr(error, "msg", None)
            raise CarrierRefused("Twilio", f"{detail} (HTTP {status})" if detail else str(error)) from error


class TelnyxApi:
    """https://developers.telnyx.com/api-reference/call-commands/dial"""

    presses_keys = True

    def __init__(self, api_key: str, *, connection_id: str = "", base_url: str | None = None) -> None:
        from telnyx import Telnyx, TelnyxError

        self._client = Telnyx(api_key=api_key, base_url=base_url, timeout=TIMEOUT_S, max_retries=0)
        # It reads the rest of itself, some thousand modules, when it is first asked: better now than in a call.
        self._calls = self._client.calls
        self._actions = self._calls.actions
        self._connection_id = connection_id
        self._errors = (TelnyxError,)

    async def dial(self, to: str, caller: str, *, webhook: str, socket: str) -> str:
        if not self._connection_id:
            raise BadRequest("to call by Telnyx, set TELNYX_CONNECTION_ID, the id of a Voice API application")
        answer = await self._ask(
            lambda: self._calls.dial(
                connection_id=self._connection_id,
                to=to,
                from_=caller,
                stream_url=socket,
                stream_track="inbound_track",
                stream_bidirectional_mode="rtp",
                stream_bidirectional_codec="PCMU",
                stream_bidirectional_target_legs="both",
                timeout_secs=RING_S,
            )
        )
        return str(answer.data.call_control_id)

    async def state(self, call: str) -> str:
        answer = await self._ask(lambda: self._calls.retrieve_status(call))
        return "" if answer.data.is_alive else "over"

    async def hang_up(self, call: str) -> None:
        await self._ask(lambda: self._actions.hangup(call))

    async def transfer(self, call: str, to: str, *, webhook: str) -> None:
        await self._ask(lambda: self._actions.transfer(call, to=to))

    async def send_dtmf(self, call: str, keys: str) -> None:
        await self._ask(lambda: self._actions.send_dtmf(call, digits=keys))

    async def _ask(self, do: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(do)
        except self._errors as error:
            raise CarrierRefused("Telnyx", str(error)) from error


class PlivoApi:
    """https://www.plivo.com/docs/voice/api/call"""

    presses_keys = True

    def __init__(self, auth_id: str, auth_token: str, *, base_url: str | None = None) -> None:
        from plivo import RestClient
        from plivo.exceptions import PlivoRestError
        from requests import RequestException

        self._errors = (PlivoRestError, RequestException)
        try:
            self._client = RestClient(auth_id, auth_token, timeout=TIMEOUT_S)
        except PlivoRestError as error:
            raise BadRequest(f"Plivo's library refuses the credentials: {error}") from error
        _send_to(self._client.session, base_url)

    async def dial(self, to: str, caller: str, *, webhook: str, socket: str) -> str:
        answer = await self._ask(
            lambda: self._client.calls.create(
                from_=caller, to_=to, answer_url=webhook, answer_method="POST", ring_timeout=RING_S
            )
        )
        return str(answer.request_uuid)

    async def state(self, call: str) -> str:
        return ""  # Only its webhooks tell.

    async def hang_up(self, call: str) -> None:
        await self._ask(lambda: self._client.calls.cancel(call))

    async def transfer(self, call: str, to: str, *, webhook: str) -> None:
        await self._ask(lambda: self._client.calls.transfer(call, legs="aleg", aleg_url=webhook, aleg_method="GET"))

    async def send_dtmf(self, call: str, keys: str) -> None:
        await self._ask(lambda: self._client.calls.send_digits(call, keys))

    async def _ask(self, do: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(do)
        except self._errors as error:
            raise CarrierRefused("Plivo", str(error)) from error


class VonageApi:
    """https://developer.vonage.com/en/api/voice"""

    presses_keys = True

    def __init__(self, application_id: str, private_key: str, *, base_url: str | None = None) -> None:
        from pydantic import ValidationError
        from requests import RequestException
        from vonage_http_client import Auth, HttpClient, HttpClientOptions
        from vonage_utils.errors import VonageError
        from vonage_voice import Voice

        self._errors = (VonageError, ValidationError, RequestException)
        try:
            auth = Auth(application_id=application_id, private_key=private_key)
        except (VonageError, OSError) as error:
            raise BadRequest(f"Vonage's library cannot read VONAGE_PRIVATE_KEY: {error}") from error
        http = HttpClient(auth, HttpClientOptions(timeout=TIMEOUT_S, max_retries=0))
        _send_to(http._session, base_url)
        self._voice = Voice(http)

    async def dial(self, to: str, caller: str, *, webhook: str, socket: str) -> str:
        from vonage_voice import CreateCallRequest, Phone, ToPhone

        def create() -> Any:
            wanted = CreateCallRequest(
                to=[ToPhone(number=_plain(to))],
                from_=Phone(number=_plain(caller)),
                answer_url=[webhook],
                answer_method="GET",
                ringing_timer=RING_S,
            )
            return self._voice.create_call(wanted)

        return str((await self._ask(create)).uuid)

    async def state(self, call: str) -> str:
        return str((await self._ask(lambda: self._voice.get_call(call))).status)

    async def hang_up(self, call: str) -> None:
        await self._ask(lambda: self._voice.hangup(call))

    async def transfer(self, call: str, to: str, *, webhook: str) -> None:
        from vonage_voice.models.connect_endpoints import PhoneEndpoint
        from vonage_voice.models.ncco import Connect

        def connect() -> None:
            # From one of the application's numbers, whichever: which one this call came to is not known here.
            self._voice.transfer_call_ncco(
                call, [Connect(endpoint=[PhoneEndpoint(number=_plain(to))], randomFromNumber=True)]
            )

        await self._ask(connect)

    async def send_dtmf(self, call: str, keys: str) -> None:
        await self._ask(lambda: self._voice.play_dtmf_into_call(call, keys))

    async def _ask(self, do: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(do)
        except self._errors as error:
            raise CarrierRefused("Vonage", " ".join(str(error).split())) from error


_NEEDS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "twilio": ("phone", "twilio", ("TWILIO_ACCOUNT_SID", "TWILIO_AUTH_TOKEN")),
    "telnyx": ("telnyx", "telnyx", ("TELNYX_API_KEY",)),
    "plivo": ("plivo", "plivo", ("PLIVO_AUTH_ID", "PLIVO_AUTH_TOKEN")),
    "vonage": ("vonage", "vonage_voice", ("VONAGE_APPLICATION_ID", "VONAGE_PRIVATE_KEY")),
}
"""Extra, library and variables of each."""


def carrier_api(carrier: str, environment: Mapping[str, str], *, base_url: str | None = None) -> CarrierApi:
    """The account that environment variables name.  Raises `BadRequest` where one is missing, or `MissingExtra`.

    base_url: in place of the carrier's own address.
    """
    if carrier not in _NEEDS:
        raise BadRequest(f"no calls are placed by {carrier!r}; there are {', '.join(_NEEDS)}")
    extra, library, names = _NEEDS[carrier]
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise BadRequest(f"set {' and '.join(missing)}: {carrier.capitalize()} asks who you are")
    if importlib.util.find_spec(library) is None:
        raise MissingExtra(f"calling by {carrier.capitalize()}", extra)
    values = [environment[name] for name in names]
    match carrier:
        case "twilio":
            return TwilioApi(*values, base_url=base_url)
        case "telnyx":
            return TelnyxApi(*values, connection_id=environment.get("TELNYX_CONNECTION_ID", ""), base_url=base_url)
        case "plivo":
            return PlivoApi(*values, base_url=base_url)
    return VonageApi(*values, base_url=base_url)


def carrier_apis(environment: Mapping[str, str]) -> dict[str, CarrierApi]:
    """The accounts that are there: with their variables set and their libraries installed."""
    return {
        carrier: carrier_api(carrier, environment)
        for carrier, (_, library, names) in _NEEDS.items()
        if all(environment.get(name) for name in names) and importlib.util.find_spec(library) is not None
    }


def _plain(number: str) -> str:
    """As Vonage writes numbers."""
    return number.removeprefix("+")


def _send_to(session: Any, base_url: str | None) -> None:
    """Send a library's requests elsewhere: these know no other address than the carrier's."""
    if base_url is None:
        return
    from requests.adapters import HTTPAdapter

    here = urlsplit(base_url)

    class Elsewhere(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            request.url = f"{here.scheme}://{here.netloc}{here.path.rstrip('/')}{request.path_url}"
            return super().send(request, *args, **options)

    session.mount("https://", Elsewhere())
