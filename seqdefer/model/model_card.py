"""The model card of a fitted folder (README.md, with its curve), and a demo for a Space of the Hugging Face Hub.

Both are made of the records beside them. A card of the user's own is left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seqdefer.budgets.calibration import Calibration, LossCurve
from seqdefer.model.folders import ROLES, Pairing
from seqdefer.report.notebook import curve_svg
from seqdefer.storage.files import write_text

MODEL_CARD_FILE, PICTURE_FILE, DEMO_FILE, NEEDS_FILE = "README.md", "curve.svg", "app.py", "requirements.txt"
CARD_BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
MADE_BY = "<!-- made by seqdefer; remove this line to keep changes of your own -->"
DEMO = '''"""A demo of this model. In a Space of the Hugging Face Hub with the SDK gradio, it starts by itself."""

from pathlib import Path

import gradio as gr

from seqdefer import DeferringModel

model = DeferringModel.from_pretrained(Path(__file__).parent)


def write(text: str, budget: float) -> str:
    return model.generate([text], budget=budget).to_html()


demo = gr.Interface(
    write,
    [gr.Textbox(label="Input", lines=6), gr.Slider(0, 1, value=0.2, label="Budget: share of tokens by the expert")],
    gr.HTML(),
    title="Partial deferral",
    description="The expert's tokens are underlined. A budget holds on average, not for each input.",
)

if __name__ == "__main__":
    demo.launch()
'''


def write_model_card(
    folder: Path, pairing: Pairing, calibration: Calibration | None, curve: LossCurve | None, method: str
) -> None:
    """Write the card and its curve into the folder of a model."""
    card = folder / MODEL_CARD_FILE
    (folder / PICTURE_FILE).unlink(missing_ok=True)
    if curve is not None:
        write_text(folder / PICTURE_FILE, str(curve_svg(curve)))
    if not card.is_file() or MADE_BY in card.read_text(encoding="utf-8", errors="replace"):
        write_text(card, card_text(pairing, calibration, curve, method))


def write_demo(folder: Path) -> None:
    """Write the demo, and what it needs."""
    write_text(folder / DEMO_FILE, DEMO)
    write_text(folder / NEEDS_FILE, "seqdefer[text]\ngradio\n")


def card_text(pairing: Pairing, calibration: Calibration | None, curve: LossCurve | None, method: str) -> str:
    """Return the card in Markdown."""
    predictor, expert = (_model(pairing, role) for role in ROLES)
    predictor = predictor[0].upper() + predictor[1:]
    return "\n".join(
        [
            *_front_matter(pairing), "", MADE_BY, "",
            "# A pair with partial deferral", "",
            f"{predictor} writes; a learned rejector ({method or 'a rule'}) says where {expert} takes over, within a "
            "budget: the share of tokens that the expert writes.", "",
            "## Use", "", "```python", "from seqdefer import DeferringModel", "",
            'model = DeferringModel.from_pretrained("OWNER/NAME")  # or the folder',
            'print(model.generate(["..."], budget=0.2))', "```", "",
            "`app.py` is a demo: copy this folder into a Space with the SDK gradio.", "",
            "## What a budget buys", "", *_curve_lines(calibration, curve), "",
            "## Data", "", f"- task: `{Path(pairing.task).name}`, metric: {_metric(pairing, curve)}",
            f"- fitted on: {pairing.data or 'not recorded'}", f"- recipe: {pairing.recipe or 'not recorded'}", "",
            "## Limits", "",
            "- A budget holds on average over inputs like those it was measured on, not for each input.",
            "- The rejector belongs to this predictor; another pair is refused.",
            f"- At most {pairing.options.get('length', '?')} tokens are written, greedily.",
            "- All limits and licences of both models apply.", "",
        ]
    )  # fmt: skip


def _front_matter(pairing: Pairing) -> list[str]:
    bases = [_repository(pairing, role) for role in ROLES]
    listed = [f"- {name}" for name in bases if name]
    tags = ["library_name: seqdefer", "tags:", "- partial-deferral", "- model-cascade"]
    return ["---", *tags, *(["base_model:", *listed] if listed else []), "---"]


def _curve_lines(calibration: Calibration | None, curve: LossCurve | None) -> list[str]:
    if calibration is None:
        return ["Budgets were not measured; `model.calibrate(inputs)` does that."]
    unit = "" if curve is None else f" {curve.unit} |"
    lines = [f"| budget | share by the expert |{unit}", f"|---|---|{'' if curve is None else '---|'}"]
    for budget in CARD_BUDGETS:
        share = calibration.for_budget(budget).share
        loss = "" if curve is None else f" {curve.loss_at(share):.2f} |"
        lines.append(f"| {budget:g} | {share:.3f} |{loss}")
    if curve is None:
        return [*lines, "", f"Measured on {calibration.inputs} inputs."]
    picture = [f"![Loss against the share of tokens by the expert]({PICTURE_FILE})", ""]
    return [*picture, *lines, "", f"Losses of {curve.inputs} validation inputs, budgets of {calibration.inputs}."]


def _metric(pairing: Pairing, curve: LossCurve | None) -> str:
    return str(pairing.options.get("metric") or (curve.unit if curve is not None else "not recorded"))


def _repository(pairing: Pairing, role: str) -> str:
    """Return the name on the Hub, "" of a folder or an address."""
    name = str(pairing.options.get(role) or "").partition("@")[0]
    is_elsewhere = name.startswith(("/", ".", "~")) or "://" in name
    return "" if is_elsewhere or name.count("/") != 1 else name


def _model(pairing: Pairing, role: str) -> str:
    """Name a model without the folders of the machine that fitted it."""
    named: Any = _repository(pairing, role)
    return f"[{named}](https://huggingface.co/{named})" if named else f"the {role} (`{getattr(pairing, role)}`)"
