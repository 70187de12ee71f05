"""The folder of a fitted model: what is stored is loaded, and what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_pair import Toy, numbers

from seqdefer.budgets.calibration import LossCurve, LossPoint
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.interfaces import TaskEntry
from seqdefer.model import folders
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.folders import Pairing
from seqdefer.tasks.common.options import option

pytestmark = pytest.mark.usefixtures("one_thread")


INPUTS = numbers(40)


@dataclass(frozen=True)
class Options:
    length: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise OptionError("too short")


def serve(options: Options, folder: Path, *_: Any) -> Any:
    assert folder.name == "work"
    return Toy.of(**asdict(options)).served


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the task `toy` in a folder."""
    entry = TaskEntry("toy", "a toy", {"quick": Options()}, lambda *_: None, serve=serve)  # type: ignore[arg-type,return-value]
    tasks = {"toy": entry, "mute": replace(entry, serve=None)}
    monkeypatch.setattr(folders, "load_task", tasks.__getitem__)
    model = Toy.of(length=6).model("TokenwiseModel")
    model.pairing = folders.pairing_of("toy", Options(), model.served)
    model.calibrate(numbers(50))
    return model.save_pretrained(tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_loaded_writes_the_same(saved: Path) -> None:
    one, other = DeferringModel.from_pretrained(saved), Toy.of(length=6).model("TokenwiseModel")
    other.calibrate(numbers(50))
    assert one.calibration == other.calibration
    assert one.pairing == Pairing("toy", {"length": 6, "seed": 0}, "toy-5-6-0", "")
    for budget in (0.0, 0.3, 1.0):
        assert one.generate(INPUTS, budget).outputs == other.generate(INPUTS, budget).outputs


def test_a_model_without_budgets_is_kept_and_budgets_are_added(saved: Path) -> None:
    model = DeferringModel.from_pretrained(saved)
    model.calibration = None
    model.save_pretrained(saved)
    assert not (saved / "calibration.json").exists()  # of other weights, perhaps
    bare = DeferringModel.from_pretrained(saved)
    assert bare.calibration is None
    assert "Budgets were not measured" in (saved / "README.md").read_text()
    bare.calibrate(numbers(20))
    bare.save_calibration(saved)
    assert "Measured on 20 inputs." in (saved / "README.md").read_text()
    loaded = DeferringModel.from_pretrained(saved).calibration
    assert loaded is not None
    assert loaded.inputs == 20


def test_a_model_put_together_by_hand_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot name its pair; give it a Pairing"):
        Toy.of(length=6).model("TokenwiseModel").save_pretrained(tmp_path)


def test_deferral_json_is_written_last(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed in between leaves a folder that says so, not new weights under an old name."""
    model = DeferringModel.from_pretrained(saved)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(folders, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(saved)
    assert (saved / "rejector" / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"it has no deferral\.json; make one: seqdefer fit TASK"):
        DeferringModel.from_pretrained(saved)
    (saved / "work").mkdir()
    with pytest.raises(CheckpointError, match="the same seqdefer fit resumes it"):
        DeferringModel.from_pretrained(saved)


def spoil(saved: Path, what: str) -> None:
    pairing, measured, rejector = saved / "deferral.json", saved / "calibration.json", saved / "rejector"
    match what:
        case "other weights":
            torch.manual_seed(5)
            other = DeferringModel.from_pretrained(saved).rejector
            next(other.parameters()).data += 1
            other.save_pretrained(rejector)
        case "other predictor":
            edit(pairing, options={"length": 6, "seed": 3})
        case "other expert":
            edit(pairing, expert="abc")
        case "other length":
            edit(pairing, options={"length": 9, "seed": 0}, predictor="toy-5-9-0")
        case "no JSON":
            pairing.write_text("{")
        case "no field":
            pairing.write_text('{"format": 1, "task": "toy"}')
        case "other format":
            edit(pairing, format=99)
        case "unknown option":
            edit(pairing, options={"length": 6, "colour": 3})
        case "option of another type":
            edit(pairing, options={"length": "six"})
        case "mute task":
            edit(pairing, task="mute")
        case "damaged budgets":
            measured.write_text("[]")
        case "few budgets":
            edit(measured, settings=[])
        case "no rejector":
            (rejector / "config.json").unlink()
        case "damaged rejector":
            (rejector / "model.safetensors").write_bytes(b"123")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other weights", "belongs to another rejector; measure it again: seqdefer calibrate"),
        ("other predictor", "was fitted with predictor toy-5-6-0, and what it names is now toy-5-6-3; put that predi"),
        (
            "other expert",
            "was fitted with expert abc, and what it names is now ; put that expert back, or fit again, or say where",
        ),
        ("other length", "was fitted for predictor toy-5-6-0, not for toy-5-9-0"),
        ("no JSON", "deferral.json is not valid JSON: .*; fit it again: seqdefer fit TASK"),
        ("no field", "deferral.json: field 'options' is missing; fit it again: seqdefer fit TASK"),
        ("other format", "field 'format' is 99; this version of seqdefer reads format 1; fit it again"),
        ("unknown option", "options of task 'toy' are not those of this version: .*'colour'; fit it again"),
        ("option of another type", "options of task 'toy' are not those of this version: "),
        ("mute task", "task 'mute' has no pair to serve"),
        ("damaged budgets", "calibration.json: .*; measure it again: seqdefer calibrate .*model --data FILE"),
        ("few budgets", "has 0 settings, not 101; measure it again"),
        ("no rejector", "no rejector in .*rejector: it has no config.json; fit"),
        ("damaged rejector", "cannot read .*model.safetensors"),
    ],
)
def test_folders_that_are_refused(what: str, message: str, saved: Path) -> None:
    spoil(saved, what)
    with pytest.raises((CheckpointError, OptionError), match=message) as raised:
        DeferringModel.from_pretrained(saved)
    assert "\n" not in str(raised.value)


def test_a_curve_is_kept_beside_its_rejector_and_no_other(saved: Path) -> None:
    model = DeferringModel.from_pretrained(saved)
    model.curve = LossCurve("errors", 9, model.rejector.fingerprint, (LossPoint(0.0, 2.0), LossPoint(1.0, 0.5)))
    model.save_pretrained(saved)
    again = DeferringModel.from_pretrained(saved)
    assert again.curve == model.curve
    again.calibrate(numbers(20))  # without losses: the curve stays
    again.save_calibration(saved)
    assert DeferringModel.from_pretrained(saved).curve == model.curve
    path = saved / "curve.json"
    whole = path.read_text()
    belongs = r"curve\.json belongs to another rejector; fit again, or remove the file"
    for wrong, message in (({"rejector": "another"}, belongs), ({"points": 5}, "points")):
        edit(path, **wrong)
        with pytest.raises(CheckpointError, match=message):
            DeferringModel.from_pretrained(saved)
        path.write_text(whole)
    path.unlink()
    assert DeferringModel.from_pretrained(saved).curve is None


@pytest.mark.parametrize(
    ("name", "action"),
    [("calibration.json", "measure it again: seqdefer calibrate"), ("curve.json", "fit again, or remove the file")],
)
def test_a_changed_digit_is_noticed(name: str, action: str, saved: Path) -> None:
    """Another threshold, or another loss, was once loaded and served."""
    model = DeferringModel.from_pretrained(saved)
    model.curve = LossCurve("errors", 9, model.rejector.fingerprint, (LossPoint(0.0, 2.0), LossPoint(1.0, 0.5)))
    model.save_pretrained(saved)
    edit(saved / name, inputs=json.loads((saved / name).read_text())["inputs"] + 1)
    with pytest.raises(CheckpointError, match=rf"{name} is not what was written: .*deferral.json.*; {action}"):
        DeferringModel.from_pretrained(saved)


def test_folders_of_the_last_version_have_no_digests(saved: Path) -> None:
    manifest = json.loads((saved / "deferral.json").read_text())
    assert list(manifest.pop("digests")) == ["calibration.json"]
    (saved / "deferral.json").write_text(json.dumps(manifest))
    model = DeferringModel.from_pretrained(saved)
    assert model.calibration is not None
    model.save_calibration(saved)
    assert list(json.loads((saved / "deferral.json").read_text())["digests"]) == ["calibration.json"]


@pytest.mark.parametrize("what", ["other weights", "damaged budgets", "few budgets"])
def test_wrong_budgets_can_be_measured_again(what: str, saved: Path) -> None:
    spoil(saved, what) if what != "other weights" else edit(saved / "calibration.json", rejector="of old")
    model = DeferringModel.from_pretrained(saved, budgets=False)
    model.calibrate(numbers(50))
    model.save_calibration(saved)
    assert DeferringModel.from_pretrained(saved).calibration == model.calibration


def test_folders_of_a_pair_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Named:
        predictor: str = option("small", "", is_path=True)
        expert: str = option("hub/name", "", is_path=True)
        empty: str = option("", "", is_path=True)
        data: str | None = option(None, "", is_path=True)
        policy: str = option("rl4co:small", "", is_path=True)
        solver: str = option("program:bin/solve", "", is_path=True)
        dataset: str = option("hub/name:small/train", "", is_path=True)
        nothing: str = option("rl4co:", "", is_path=True)
        url: str = option("", "", is_path=True)
        prompt: str = option("x" * 300, "", is_path=True)
        field: str = option("small", "")  # a word, though there is a folder of that name

    (tmp_path / "small").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "solve").touch()
    monkeypatch.chdir(tmp_path)
    named = Named(url=f"https:/{tmp_path / 'small'}")  # a folder of that name is not what it means
    options = folders.pairing_of("toy", named, Toy.of().served).options
    changed = {
        "predictor": str(tmp_path / "small"),
        "policy": f"rl4co:{tmp_path / 'small'}",
        "solver": f"program:{tmp_path / 'bin' / 'solve'}",
    }
    assert options == {**asdict(named), **changed}
