"""Check whether the Hugging Face Hub is reachable; its own clients retry for half a minute and log every attempt."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies


def is_hub_reachable() -> bool:
    """Whether the Hub's host name resolves; True behind a proxy, which resolves names itself."""
    if getproxies().keys() - {"no"}:  # "no" lists hosts that bypass the proxy
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Restrict the Hub's client to its cache while the Hub is unreachable. Yield whether it is restricted."""
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is None or is_hub_reachable():
        yield False
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # the client reads the environment variable only when it is imported
    try:
        yield True
    finally:
        constants.HF_HUB_OFFLINE = before
