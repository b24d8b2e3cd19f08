"""`python -m breeze_rtc.sip`: answers SIP calls, and brings each to a server's telephone door."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress

from breeze_rtc.errors import BreezeError

PARENT_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m breeze_rtc.sip", description=__doc__)
    parser.add_argument(
        "--listen", default="127.0.0.1:5060", metavar="HOST:PORT", help="where calls come in (UDP, TCP)"
    )
    parser.add_argument("--door", required=True, metavar="URL", help="ws://HOST:PORT/phone/KEY/sip of a server")
    parser.add_argument("--account", metavar="sip:NAME@HOST", help="register there; the password is in $SIP_PASSWORD")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_answer(options))
    except BreezeError as error:
        sys.exit(f"error: {error}")


async def _answer(options: argparse.Namespace) -> None:
    from breeze_rtc.sip.bridge import bridge
    from breeze_rtc.sip.endpoint import Call, Endpoint, Registration

    host, _, port = options.listen.rpartition(":")
    account = Registration(options.account, os.environ.get("SIP_PASSWORD", "")) if options.account else None
    endpoint = Endpoint(host, int(port), registration=account)
    bridges: set[asyncio.Task[None]] = set()

    def take(call: Call) -> None:
        task = asyncio.create_task(bridge(call, options.door))
        bridges.add(task)
        task.add_done_callback(bridges.discard)

    endpoint.on_call = take
    ends = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    endpoint.start()
    print(f"Calls are answered at sip:agent@{host}:{endpoint.port}", flush=True)
    parent = os.getppid()
    try:
        while not ends.is_set() and os.getppid() == parent:  # Whoever started it has not died.
            with suppress(TimeoutError):
                async with asyncio.timeout(PARENT_S):
                    await ends.wait()
    finally:
        for task in bridges:
            task.cancel()
        await asyncio.gather(*bridges, return_exceptions=True)
        await endpoint.close()


if __name__ == "__main__":
    main()
