"""Fixtures for every test."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch

    from seqdefer.tasks.weather.task import WeatherTask

# The tests' tensors are tiny. More threads only wait for each other, on a busy machine a hundred times longer than the
# work takes. Read when torch is loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run: a test that fails, fails for everybody. Others: pytest --hypothesis-profile random
settings.register_profile("random", deadline=None)  # a busy machine is no failure
settings.register_profile("seqdefer", settings.get_profile("random"), derandomize=True)
settings.load_profile("seqdefer")


# Optional packages that `make test` does not install. A module that asks for one is part of `make test-all`; so is a
# module that imports a module of `support` that asks for one.
OPTIONAL = "transformers|sacrebleu|soundfile|onnx|openai|opentelemetry|ray|schemathesis"
EXTRA = re.compile(rf"(importorskip|find_spec)\(\"({OPTIONAL})\b|interpreted_kernels\(\)")
IMPORT = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
SUPPORT = Path(__file__).parent / "support"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for path, tests in groupby(items, lambda item: item.path):
        if needs_extra(path):
            for test in tests:
                test.add_marker("extra")


@cache
def needs_extra(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    imported = [SUPPORT / f"{name}.py" for name in IMPORT.findall(text)]
    return EXTRA.search(text) is not None or any(needs_extra(one) for one in imported if one.is_file())


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> None:
    """Ctrl-C is Python's: a shell that starts tests in the background has it ignored, and solvers take it over."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the repository, with data and models too large for it."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder `shared` beside the repository, which is not here")
    return path


@pytest.fixture(scope="session")
def fetch() -> Callable[[str], bytes]:
    """Gets the bytes behind an address, or skips the test with the reason. For tests marked `network`."""

    def get(url: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                return bytes(response.read())
        except OSError as error:  # refused, unknown host, time-out, HTTP status
            pytest.skip(f"cannot fetch {url}: {error}")

    return get


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers that are the same in every run."""
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight weeks of made-up temperatures, as a CSV file."""
    from oracles import temperatures, write_record

    return write_record(tmp_path_factory.mktemp("record") / "made-up.csv", temperatures())


@pytest.fixture(scope="session")
def weather(record: Path, tmp_path_factory: pytest.TempPathFactory) -> WeatherTask:
    """The weather task on that record, with a predictor that was hardly trained. Nobody may change it."""
    from oracles import prepare_weather

    return prepare_weather(record, tmp_path_factory.mktemp("weather"))


@pytest.fixture(scope="session")
def toy_labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The labels of the toy in `labelling_toy`, as this process makes them alone, one job after the other."""
    from labelling_toy import files_in, label_toy

    out = tmp_path_factory.mktemp("fresh")
    made = label_toy(out)
    assert [(one.found, one.made) for one in made] == [(0, 4)] * 5
    return files_in(out / "labels")


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """`spy(owner, "method")` notes the arguments of every call from then on, in the list it returns. With `named=True`,
    named ones too, after the others."""

    def watch(owner: Any, name: str, *, named: bool = False) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        original = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append((*arguments, *options.values()) if named else arguments)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)
        return calls

    return watch


@pytest.fixture(scope="module")
def one_timed_budget() -> Iterator[None]:
    """Fitted models are timed at one budget instead of six, which is half of the time that tiny ones take to fit."""
    from seqdefer.model import calibrated_pair

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated_pair, "TIMED_BUDGETS", (0.2,))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tensors of a few numbers: on a busy machine, threads that wait for each other take most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
