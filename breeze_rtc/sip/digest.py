"""The answer to a challenge: digest authentication (RFC 3261 section 22, RFC 7616, RFC 8760)."""

from __future__ import annotations

import re
from hashlib import md5, sha256

_HASHES = {"MD5": md5, "SHA-256": sha256}
_FIELD = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


def answer(challenges: tuple[str, ...], *, method: str, uri: str, user: str, password: str, cnonce: str) -> str | None:
    """The credentials for the first challenge that can be met; None where none can."""
    for challenge in challenges:
        scheme, _, rest = challenge.partition(" ")
        fields = {name.lower(): quoted or plain for name, quoted, plain in _FIELD.findall(rest)}
        algorithm = fields.get("algorithm", "MD5").upper()
        qops = [word.strip() for word in fields.get("qop", "").split(",")]
        if scheme.lower() != "digest" or algorithm not in _HASHES or "nonce" not in fields:
            continue
        if "qop" in fields and "auth" not in qops:
            continue

        def hashed(*parts: str, algorithm: str = algorithm) -> str:
            return _HASHES[algorithm](":".join(parts).encode()).hexdigest()

        realm, nonce = fields.get("realm", ""), fields["nonce"]
        secret, asked = hashed(user, realm, password), hashed(method, uri)
        said = [f'username="{user}"', f'realm="{realm}"', f'nonce="{nonce}"', f'uri="{uri}"', f"algorithm={algorithm}"]
        if "qop" in fields:
            response = hashed(secret, nonce, "00000001", cnonce, "auth", asked)
            said += ["qop=auth", "nc=00000001", f'cnonce="{cnonce}"']
        else:
            response = hashed(secret, nonce, asked)
        said.append(f'response="{response}"')
        if "opaque" in fields:
            said.append(f'opaque="{fields["opaque"]}"')
        return "Digest " + ", ".join(said)
    return None


def is_stale(challenges: tuple[str, ...]) -> bool:
    """Only the nonce was too old; the password is right (RFC 7616 section 3.3)."""
    return any(re.search(r'stale\s*=\s*"?true', challenge, re.IGNORECASE) for challenge in challenges)
