"""The Hugging Face Hub: whether it is reachable, and datasets by name.

The Hub's own clients retry for half a minute and log every attempt, so its host name is looked up first.

    load_dataset(parse_dataset_name("openslr/librispeech_asr:clean/test"), "give files instead", extra="speech")
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from seqdefer.errors import DataError, MissingExtraError, OptionError, SeqdeferError, import_extra
from seqdefer.storage.user_files import quote

_MIN_DATASETS_VERSION = 4  # older versions run Python code of datasets
_COMMON_SPLITS = ("train", "validation", "test")


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


def cached_commit(name: str, revision: str = "") -> str:
    """Return the commit of a model in the Hub's cache; "" where it is not there."""
    find = import_module("huggingface_hub").try_to_load_from_cache
    try:
        found = find(name, "config.json", revision=revision or None)
    except ValueError:  # not the name of a repository
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


# --- datasets --------------------------------------------------------------------------------------------------------


class DatasetName(NamedTuple):
    """A split of a dataset."""

    name: str
    config: str | None
    split: str

    @property
    def label(self) -> str:
        """The name as users write it."""
        return f"{self.name}{f':{self.config}' if self.config else ''}/{self.split}"


def parse_dataset_name(name: str, split: str = "train") -> DatasetName:
    """Split NAME[:CONFIG][/SPLIT] into name, config and split. NAME may be OWNER/NAME: in A/B without a config, B is a
    split only if it is a common one (xsum/test, but EdinburghNLP/xsum)."""
    head, colon, tail = name.partition(":")
    if colon:
        config, slash, named = tail.partition("/")
    else:
        config, (*owner, last) = "", head.split("/")
        slash = "/" if len(owner) == 2 or (len(owner) == 1 and last in _COMMON_SPLITS) else ""
        head, named = ("/".join(owner), last) if slash else (head, "")
    if not head.strip("/") or (colon and not config) or (slash and not named):
        raise OptionError(f"cannot read the dataset {quote(name)}; write NAME, NAME:CONFIG, NAME/SPLIT or both")
    return DatasetName(head, config or None, named or split)


def load_dataset(wanted: DatasetName, instead: str, *, extra: str, streaming: bool = False) -> Any:
    """Return the rows of a dataset. `instead` says in errors what else to give; `extra` installs `datasets`.

    streaming: rows come as they are read, and other splits are not downloaded."""
    datasets = import_extra("datasets", extra, f"the dataset {wanted.label!r}", instead)
    if int(datasets.__version__.split(".")[0]) < _MIN_DATASETS_VERSION:
        raise MissingExtraError(
            f"the package 'datasets' is {datasets.__version__}; {_MIN_DATASETS_VERSION} or newer is needed, which does"
            f" not run code of datasets; update it with: pip install 'seqdefer[{extra}]'; or {instead}"
        )
    options = {"streaming": True} if streaming else {}
    with dataset_errors(wanted, instead):
        return datasets.load_dataset(wanted.name, wanted.config, split=wanted.split, **options)


@contextmanager
def dataset_errors(wanted: DatasetName, instead: str) -> Iterator[None]:
    """Turn what goes wrong while a dataset is read into a DataError; without a network, only the cache is tried."""
    with offline_if_unreachable() as is_offline:
        try:
            yield
        except SeqdeferError:
            raise
        except Exception as error:  # a bad name, no network, a full disk: these errors share no base class
            reason = " ".join(str(error).split()) or type(error).__name__
            if is_offline and isinstance(error, ConnectionError):
                reason = "it is not in the Hub's cache, and there is no network"
            raise DataError(f"cannot load the dataset {wanted.label}: {reason}; {instead}") from error
