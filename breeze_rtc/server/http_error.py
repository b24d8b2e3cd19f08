"""Errors over HTTP: every one is JSON, `{"error": {"code", "message", "fix"}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from breeze_rtc.errors import (
    BadRecording,
    BadRequest,
    BadSampling,
    BadText,
    BreezeError,
    CannotKeep,
    EngineClosed,
    Overloaded,
    PeerError,
    UnknownVoice,
)
from breeze_rtc.runtime.engine import MAX_TEXT_CHARS

log = logging.getLogger(__name__)


class HttpError(Exception):
    """An answer that is an error: its status, and the three fields of its body."""

    def __init__(self, status: int, code: str, message: str, fix: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.fix = fix
        self.retry_after_s = retry_after_s

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        body = {"error": {"code": self.code, "message": self.message, "fix": self.fix}}
        return JSONResponse(body, self.status, headers)


def http_error(error: BreezeError, *, code: str = "overloaded", fix: str = "Try again later.") -> HttpError:
    """One of our errors in the words of HTTP; `code` and `fix` are those of an `Overloaded`."""
    match error:
        case Overloaded():
            return HttpError(503, code, str(error), fix, error.retry_after_s)
        case EngineClosed():
            return HttpError(503, "engine_closed", str(error), "Try again in a few seconds.", 2.0)
        case UnknownVoice():
            return HttpError(400, "unknown_voice", str(error), 'Leave "voice" out for the default.')
        case BadSampling():
            return HttpError(400, "bad_sampling", str(error), f"Leave {error.name!r} out for the model's own value.")
        case BadText():
            return HttpError(400, "bad_text", str(error), f"Send 1 to {MAX_TEXT_CHARS} characters.")
        case BadRecording():
            return HttpError(400, "bad_recording", str(error), "Send 5 to 15 s of one voice, as it was recorded.")
        case CannotKeep():
            return HttpError(507, "cannot_keep", str(error), "Make room on the server's disk.")
        case PeerError():
            return HttpError(400, error.code, error.detail, error.fix)
        case BadRequest():
            return HttpError(400, "bad_request", str(error))
        case _:
            return HttpError(500, "speech_failed", str(error), "The server's log says more.")


def errors_as_json(
    endpoint: Callable[[Request], Any],
) -> Callable[[Request], Any]:
    """The endpoint, with its errors as JSON; so also in an app whose error pages are its own."""

    async def answer(request: Request) -> Response:
        try:
            response: Response = await endpoint(request)
            return response
        except HttpError as error:
            return _counted(request, error).response()
        except BreezeError as error:
            return _counted(request, http_error(error)).response()
        except ClientDisconnect:
            return Response(status_code=499)

    return answer


def _counted(request: Request, error: HttpError) -> HttpError:
    log.info("%s %s: %d %s", request.method, request.url.path, error.status, error.message)
    return error
