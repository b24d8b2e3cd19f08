"""SIP without a carrier (RFC 3261): messages, session descriptions, passwords, and a user agent, all without I/O.

`server.sip_call` joins it to sockets and `transport.rtp_line` carries the sound.  It speaks UDP and TCP, to telephones,
PBXs and providers that take G.711 without encryption.  Of a server's name it looks up the address and nothing else (no
SRV records, RFC 3263), and it knows no TLS.
"""
