"""The dashboard and the alert rules in deploy/: every metric and label that they name is one of a running server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import inputs_of, running, toy_model

from seqdefer.server.metrics import COUNTERS, GAUGES, HISTOGRAMS

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra 'server'")

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD, RULES = DEPLOY / "grafana" / "seqdefer.json", DEPLOY / "prometheus" / "alerts.yml"
OF_PROMETHEUS = {"up": {"job", "instance"}}
EVERYWHERE = {"job", "instance"}  # labels that Prometheus adds
METRIC = re.compile(r"\b(?:seqdefer|process|python)_[a-z_]+\b|\bup\b")
LABELS = (re.compile(r"\bby \(([^)]*)\)"), re.compile(r"\{([^}]*)\}"))


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names of a real server's metrics, as its histograms and counters are queried, with their labels."""
    with running(toy_model()) as server:
        for place, one in enumerate(inputs_of(6)):
            list(server.complete(one, 0.2 * place, stream=bool(place % 2)))
        server.wait_until_idle()
        families = list(parser.text_string_to_metric_families(server.get("/metrics").text))
    found: dict[str, set[str]] = {**OF_PROMETHEUS}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    declared = {**COUNTERS, **GAUGES, **HISTOGRAMS}
    for name in {family.name for family in families} | {f"{family.name}_total" for family in families}:
        if name in declared:  # it has no sample before something happens
            suffixes = ("_bucket", "_sum", "_count") if name in HISTOGRAMS else ("",)
            for suffix in suffixes:
                found.setdefault(name + suffix, {*declared[name][1]} | ({"le"} if suffix == "_bucket" else set()))
    return found


def queries() -> Iterator[tuple[str, str]]:
    for panel in json.loads(BOARD.read_text())["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_what_is_shown_exists(exported: dict[str, set[str]], title: str, query: str) -> None:
    names = METRIC.findall(query)
    assert names, title
    assert set(names) <= set(exported)
    known = set.union(EVERYWHERE, *(exported[name] for name in names))
    for pattern in LABELS:
        for inside in pattern.findall(query):
            labels = {re.split(r"[=!~]", part)[0].strip() for part in inside.split(",")}
            assert labels <= known, query


def test_all_own_metrics_are_shown() -> None:
    shown = {name for _, query in queries() for name in METRIC.findall(query)}
    for name in (*COUNTERS, *GAUGES):
        assert name in shown
    for name in HISTOGRAMS:
        assert {f"{name}_bucket", f"{name}_sum"} & shown


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in json.loads(BOARD.read_text())["panels"]:
        place: Any = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_rules_are_valid() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    checked = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
