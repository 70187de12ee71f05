"""What sequences cost by a file of prices, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.budgets.prices import Prices, Rates, read_prices, total
from seqdefer.errors import OptionError

FILE = """
currency = "EUR"

[predictor]
hour = 3.6
seconds_per_token = 0.5

[expert]
input = 2
cached_input = 1
output = 10
call = 0.5
"""
EXPERT_ONLY = "[expert]\noutput = 1\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.toml"
    path.write_text(text)
    return path


def test_a_bill_by_hand(tmp_path: Path) -> None:
    """By token the expert is called at 1 and 3: it reads 10 + 1 tokens, then 2 more beside 11 cached ones."""
    prices = read_prices(write(tmp_path, FILE))
    bill = prices.bill(10, [0, 1, 0, 1, 0], by_token=True)
    assert bill.predictor == pytest.approx(5 * 0.5 * 3.6 / 3600)
    assert bill.expert == pytest.approx(2 * 0.5 + (2 * 13 + 1 * 11 + 10 * 2) / 1e6)
    assert bill.alone == pytest.approx(0.5 + (2 * 10 + 10 * 5) / 1e6)
    assert bill.spent == bill.predictor + bill.expert
    assert bill.saved < 0  # two calls cost more than one
    plain = bill.plain()
    assert (plain["currency"], plain["saved"]) == ("EUR", bill.saved)


def test_a_hand_off_is_one_call(tmp_path: Path) -> None:
    prices = read_prices(write(tmp_path, FILE))
    assert prices.bill(10, [0, 0, 1, 1], by_token=False).expert == pytest.approx(0.5 + (2 * 12 + 10 * 2) / 1e6)
    assert prices.bill(10, [0, 0], by_token=False).expert == 0
    both = total([prices.bill(10, [0, 1], by_token=True), prices.bill(3, [1], by_token=True)])
    assert both.expert == pytest.approx(2 * 0.5 + (2 * 11 + 10 + 2 * 3 + 10) / 1e6)


def test_a_person_is_paid_by_the_minute() -> None:
    rates = Rates(minute=0.6, seconds_per_call=20.0, seconds_per_token=2.0)
    assert rates.charge(7).of_call(3, 5) == pytest.approx(0.6 / 60 * (20 + 5 * 2))


@given(st.integers(0, 30), st.integers(1, 30), st.floats(0, 1), st.booleans())
def test_what_is_expected_lies_between_the_ends(tokens: int, length: int, share: float, by_token: bool) -> None:
    prices = Prices(Rates(output=1.0), Rates(input=1.0, output=5.0, call=1e-6))
    low, found, high = (prices.expected(tokens, length, at, by_token=by_token) for at in (0.0, share, 1.0))
    assert low - 1e-12 <= found <= high + 1e-12
    assert low == pytest.approx(prices.bill(tokens, [0] * length, by_token=by_token).spent)
    assert high == pytest.approx(prices.bill(tokens, [1] * length, by_token=by_token).spent)


def test_hours_are_counted_by_measured_times() -> None:
    prices = Prices(Rates(hour=3600.0), Rates(output=1.0))
    assert prices.with_times(0.25, None).bill(0, [0, 0], by_token=True).predictor == 0.5
    with pytest.raises(
        OptionError, match=r"the predictor has a price per hour .* add seconds_per_token or seconds_per"
    ):
        prices.with_times(None, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EXPERT_ONLY, "has no prices of the predictor; add a table [predictor], with output = 0 if it is free"),
        (FILE + "[judge]\n", "unknown part of "),
        ("[predictor]\n" + EXPERT_ONLY, "has no price; give output, call, hour or minute, 0 if it is free"),
        ("[predictor]\noutput = -1\n" + EXPERT_ONLY, "is -1; give a number from 0 to 1e+12"),
        ("[predictor]\noutput = nan\n" + EXPERT_ONLY, "is nan; give a number from 0 to 1e+12"),
        ("[predictor]\noutput = 'x'\n" + EXPERT_ONLY, "is 'x'; give a number from 0 to 1e+12"),
        ("[predictor]\noutput = true\n" + EXPERT_ONLY, "is True; give a number from 0 to 1e+12"),
        ("[predictor]\noutput = 1e308\n" + EXPERT_ONLY, "is 1e+308; give a number from 0 to 1e+12"),
        (f"[predictor]\noutput = {10**400}\n" + EXPERT_ONLY, "give a number from 0 to 1e+12"),
        ("[predictor]\nouput = 1\n" + EXPERT_ONLY, "unknown price in [predictor] of "),
        ("currency = 5\n", "currency in "),
        ("[predictor", "--prices takes a TOML file"),
    ],
)
def test_bad_prices(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        read_prices(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) or text == "[predictor"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read .*nowhere\.toml"):
        read_prices(tmp_path / "nowhere.toml")
