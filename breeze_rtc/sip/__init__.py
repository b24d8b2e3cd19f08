"""Telephone calls by SIP and RTP, without a carrier: `breeze-rtc serve --sip`.

A program of its own, `python -m breeze_rtc.sip`, answers calls with PJSIP and brings each to a server's telephone door
over a WebSocket, as carriers do: it plays what it is sent on PJSIP's clock, and gives marks back when that has passed
them.  So a call by SIP is one more line to the server, and neither PJSIP's threads nor its licence enter it: PJSIP is
under the GPL, version 2 or later, and this package is the only one that imports it.
"""
