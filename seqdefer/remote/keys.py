"""The API key of a remote expert, and the one host that may get it. Both are in the environment alone.

The address of an expert may come from a file that someone else wrote (`deferral.json`), so a key is never sent to a
host that the environment does not name.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from seqdefer.errors import OptionError

KEY_VARIABLE, HOST_VARIABLE = "SEQDEFER_EXPERT_KEY", "SEQDEFER_EXPERT_HOST"


def read_key(url: str) -> str:
    """Return the key for the endpoint at `url`, "" if there is none. Raises OptionError if the key is not for its host.

    A host is `host` or `host:port`, which means https unless it is this machine, or has its scheme before it."""
    key, host = os.environ.get(KEY_VARIABLE, ""), os.environ.get(HOST_VARIABLE, "").strip().rstrip("/").lower()
    if not (key.isascii() and key.isprintable()) or " " in key:  # the HTTP client would quote it in its error
        raise OptionError(f"the key in {KEY_VARIABLE} has a space or a letter that no key has; remove it")
    if not key:
        return ""
    parts = urlsplit(url.lower())
    is_secret = parts.scheme == "https" or _is_this_machine(parts.hostname or "")
    own = {f"{parts.scheme}://{parts.netloc}", *([parts.netloc] if is_secret else [])}
    if host not in own:
        named = f"{HOST_VARIABLE} is {host!r:.80}" if host else f"{HOST_VARIABLE} does not say where it may be sent"
        raise OptionError(
            f"{KEY_VARIABLE} has a key, but {named}, and the expert is at {url:.200}; if the key belongs there, set "
            f"{HOST_VARIABLE}={min(own, key=len):.200}"
        )
    return key


def _is_this_machine(host: str) -> bool:
    """Tell whether a name or address is this machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hide_key(text: str) -> str:
    """Return a text without the key."""
    key = os.environ.get(KEY_VARIABLE)
    return text.replace(key, "***") if key else text
