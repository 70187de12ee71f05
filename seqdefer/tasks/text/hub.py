"""Is the Hugging Face Hub within reach? Its own clients would try for half a minute, and write of each attempt."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies


def is_hub_known() -> bool:
    """Whether the Hub's address can be looked up."""
    if getproxies().keys() - {"no"}:  # "no" lists the hosts that go without one
        return True  # the proxy does the looking up
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


@contextmanager
def cache_alone_if_unknown() -> Iterator[bool]:
    """Inside, where the Hub is unknown, its loaded client looks into its cache and does not try; tells whether so."""
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is None or is_hub_known():
        yield False
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # what the variable of that name sets; there is no argument for it
    try:
        yield True
    finally:
        constants.HF_HUB_OFFLINE = before
