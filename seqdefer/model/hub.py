"""Folders of fitted models on the Hugging Face Hub, through the package huggingface_hub.

`HF_ENDPOINT` names another server, and `HF_TOKEN` or `hf auth login` the account, as for all of its clients.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seqdefer.errors import CheckpointError, OptionError, import_extra
from seqdefer.model.folders import PAIRING_FILE, WORK_FOLDER

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def local_folder(source: Path | str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of a model: the one that is named, or a download of the repository OWNER/NAME."""
    folder = Path(source).expanduser()
    if folder.is_dir() or not _REPOSITORY.fullmatch(str(source)) or _is_beside(folder):
        if revision is not None:
            raise OptionError(f"revision {revision!r} is for models on the Hub; {source} is a folder")
        return folder
    api = _api(token)
    with _one_line(str(source), "download", f"give a folder with a {PAIRING_FILE}, or a repository that you may read"):
        found = api.snapshot_download(str(source), revision=revision, ignore_patterns=f"{WORK_FOLDER}/*")
    return Path(found)


def upload(folder: Path, repository: str, *, private: bool | None, token: str | None, message: str) -> str:
    """Upload a folder, without its work; return the address of the commit."""
    if not _REPOSITORY.fullmatch(repository):
        raise OptionError(f"the repository is {repository!r:.80}; write OWNER/NAME")
    api = _api(token)
    with _one_line(repository, "upload", "check the name and the token (hf auth login, or HF_TOKEN)"):
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=f"{WORK_FOLDER}/*"
        )
    return str(done)


def _is_beside(folder: Path) -> bool:
    """Whether OWNER/NAME is more likely a folder that is missing: there is a folder OWNER here."""
    return folder.parent.is_dir()


def _api(token: str | None) -> Any:
    library = import_extra("huggingface_hub", "text", "the Hugging Face Hub")
    return library.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)


@contextmanager
def _one_line(repository: str, action: str, advice: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a name, a token or an address that is not valid; each library below has its own errors
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"cannot {action} {repository}: {reason}; {advice}") from error
