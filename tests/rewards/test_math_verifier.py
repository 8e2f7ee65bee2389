from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import RewardResult, check_answer, require_number
from megatron_dapo.rewards.math import LONGEST_PREDICTION, canonical, extract_answer, math_reward

STRICT = RewardOptions()
COMPAT = RewardOptions(verifier_mode="verl_compat")
VERIFIER_DATA = Path(__file__).parents[2].parent / "shared" / "data" / "verifier"


def judged(response: str, answer: str, options: RewardOptions = STRICT) -> RewardResult:
    return math_reward(response, answer, {}, options)


def rows(name: str) -> list[dict[str, Any]]:
    path = VERIFIER_DATA / name
    if not path.exists():
        pytest.skip(f"no {path}")
    text = path.read_text()
    found: list[dict[str, Any]] = (
        json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    )
    return found


RIGHT_IN_BOTH = [
    ("Answer: 540", "540"),
    ("Answer: $540$", "540"),
    (r"Answer: \boxed{540}", "540"),
    (r"Answer: $\boxed{540}$", "540"),
    ("Answer: 1,234", "1234"),
    ("Answer: x = 540", "540"),
    ("Answer: 72 degrees", "72"),
    (r"Answer: \text{540}", "540"),
    ("Answer:\n\n540", "540"),
    ("Some steps.\nanswer : 7\nAnswer: 540", "540"),
    (r"Answer: \frac12", r"\frac{1}{2}"),
    ("Answer: 10000", "10{,}000"),
    ("Answer: The area is $540$ cm$^2$.", "540"),
]
ONLY_STRICT_SAYS_RIGHT = [
    ("Answer: 540.", "540"),
    ("**Answer:** 540", "540"),
    ("**Answer: 540**", "540"),
    ("**Answer**: 540", "540"),
    (r"Answer: \(540\)", "540"),
    ("Answer: $$540$$", "540"),
    ("Answer: 540.0", "540"),
    (r"Answer: 1\,234", "1234"),
    ("Answer: \u22123", "-3"),
    ("Answer: 025", "25"),
    ("Answer: 25", "025"),
    ("Answer: 033", "33"),  # verl#2446
    ("Answer: 33", "033"),
    ("Answer: 540<|im_end|>", "540"),
    ("Answer\uff1a42", "42"),
    ("Answer: \uff14\uff12", "42"),
    (r"So it is \boxed{42}", "42"),
    ("Final Answer: **73**", "73"),  # Math-Verify#76
    ("Answer:\n$$\n540\n$$", "540"),
    ("Answer: $\\boxed{\n540\n}$", "540"),
    (r"Answer: The area is 540 cm$^2$.", "540"),
    (r"Answer: 540\text{ apples}", "540"),
    ("Answer: +540", "540"),
    ("Answer: 0.5", "1/2"),
    (r"Answer: $\frac{2}{4}$", "0.5"),
    (r"Answer: $1\frac{1}{2}$", "1.5"),
    (r"Answer: $-\dfrac{1}{2}$", "-.5"),
    (r"Answer: $(\frac12, 3)$", "(0.5, 3.0)"),
    ("Answer: 540\n" + "and so on. " * 40, "540"),  # further back than 300 characters
]
ONLY_COMPAT_SAYS_RIGHT = [
    ("Answer: 1,2", "12"),
    ("Answer: 2 1", "21"),
    ("Answer: 3 dollars 4", "34"),
    ("Answer: $34$ or $35$", "34"),
]
WRONG_IN_BOTH = [
    ("Answer: 541", "540"),
    ("Answer: 5400", "540"),
    ("Answer: -540", "540"),
    ("Answer: 3/4", "4/3"),
    (r"Answer: \boxed{34} or \boxed{35}", "34"),
    ("Answer: $3$$4$", "34"),
    ("Answer: 5 million", "5"),
    (r"Answer: 34 \text{ or } 35", "34"),
    ("Answer: x = 34 or x = 35", "35"),
    ("Answer: 540\nAnswer: 541", "540"),
    ("Answer: 1/0", "0"),
    ("Answer: x + y = 1", "2x + z = 1"),
    ("Answer: 1", "2x + z = 1"),
]


@pytest.mark.parametrize(
    ("response", "answer", "strict", "compat"),
    [(*row, True, True) for row in RIGHT_IN_BOTH]
    + [(*row, True, False) for row in ONLY_STRICT_SAYS_RIGHT]
    + [(*row, False, True) for row in ONLY_COMPAT_SAYS_RIGHT]
    + [(*row, False, False) for row in WRONG_IN_BOTH[:4]],
)
def test_verdicts_of_both_modes(response: str, answer: str, strict: bool, compat: bool) -> None:
    for options, right in ((STRICT, strict), (COMPAT, compat)):
        result = judged(response, answer, options)
        assert (result.acc, result.score) == ((1.0, 1.0) if right else (0.0, -1.0)), (options, result)


@pytest.mark.parametrize(("response", "answer"), WRONG_IN_BOTH)
def test_strict_says_wrong(response: str, answer: str) -> None:
    result = judged(response, answer)
    assert (result.acc, result.score, result.status) == (0.0, -1.0, "ok")


@pytest.mark.parametrize(
    ("response", "options"),
    [(text, mode) for text in ("", "I do not know.", "Answer:", "34") for mode in (STRICT, COMPAT)]
    + [
        ("**Answer:**\n\n", STRICT),
        (r"So it is \boxed{0", STRICT),
        ("Answer: $\n", STRICT),
        ("boxed 0", COMPAT),
    ],
)
def test_a_response_without_an_answer(response: str, options: RewardOptions) -> None:
    assert judged(response, "0", options) == RewardResult(-1.0, 0.0, "", "no_answer")


def test_the_last_answer_counts_and_boxes_are_not_joined() -> None:
    assert judged(r"\boxed{840}, that is \boxed{840}", "840").acc == 1.0  # Math-Verify#44
    assert judged(r"\boxed{1} then \boxed{2}", "2").acc == 1.0
    assert judged(r"\boxed{1} then \boxed{2}", "1").acc == 0.0
    assert judged(r"\boxed{\boxed{840}}", "840").prediction == "840"
    assert judged(r"\boxed{004}", "4").prediction == "4"
    assert judged(r"\boxed{5} but cut off: \boxed{\frac{1}{2}", "5").status == "no_answer"
    assert judged("Answer: 3\nso \\boxed{4}", "3").acc == 1.0
    assert judged("<think>Answer: 3</think>The result is \\boxed{4}", "4").acc == 1.0


def test_a_long_box_is_read_whole() -> None:
    terms = "+".join(f"x^{{{i}}}" for i in range(10, 27))
    assert len(rf"\boxed{{{terms}}}") >= 103  # verl#7440
    assert judged(rf"Thus \boxed{{{terms}}}", terms).acc == 1.0
    assert judged(rf"Thus \boxed{{{terms}+1}}", terms).acc == 0.0


def test_escaped_braces_do_not_end_a_box() -> None:
    assert extract_answer(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


def test_gsm8k_style_endings() -> None:
    assert judged("3 + 4 = 7\n#### 7", "7").acc == 1.0
    assert judged("He has 3 + 4 = 7 eggs.\nA: 7", "7").acc == 1.0
    assert judged("Plan A: 7 eggs", "7").status == "no_answer"


def test_numbers_are_exact_at_any_size() -> None:
    big = 10**40 + 1
    assert judged(f"Answer: {big}", str(big)).acc == 1.0
    assert judged(f"Answer: {big + 1}", str(big)).acc == 0.0
    huge = "7" * 20_000
    assert judged(f"Answer: 00{huge}.0", huge).acc == 1.0
    assert judged(f"Answer: {huge}1", huge).acc == 0.0
    assert len(judged(f"Answer: {huge}", huge).prediction) == LONGEST_PREDICTION
    assert judged("Answer: 0.30000000000000004", "0.3").acc == 0.0


def test_equal_answers_have_one_prediction() -> None:
    spellings = [r"$\frac{2469}{2}$", "x = $1{,}234.50$ dollars.", "2469/2", "1,234.5", r"1234\frac{1}{2}"]
    assert {canonical(s) for s in spellings} == {"2469/2"}


@given(st.integers(-(10**9), 10**9), st.integers(-3, 3), st.sampled_from(RIGHT_IN_BOTH + ONLY_STRICT_SAYS_RIGHT))
@settings(max_examples=150, deadline=None)
def test_every_wrapping_leaves_an_integer_what_it_is(number: int, off: int, row: tuple[str, str]) -> None:
    response, answer = row
    if "540" not in response or answer != "540" or "+540" in response:
        return
    verdict = judged(response.replace("540", str(number + off)), str(number))
    assert verdict.acc == float(off == 0)
    assert verdict.prediction == str(number + off)


@given(st.text(alphabet="Answer: \\boxed{}$12,./-=\n*frac^ or()", max_size=80), st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_verdict(response: str, answer: str) -> None:
    for options in (STRICT, COMPAT):
        result = judged(response, answer, options)
        assert result.score == (1.0 if result.acc else -1.0)


# --- recorded model outputs ---------------------------------------------------------------------------------


def test_labels_of_gsm8k_model_outputs() -> None:
    outputs = rows("gsm8k_model_outputs.jsonl")
    wrong = [r["id"] for r in outputs if judged(r["response"], r["gold"]).acc != float(r["expected"])]
    assert len(outputs) == 2110
    assert wrong == []


def test_labels_of_boxed_chains() -> None:
    """317 of 320 labels agree; in the other three the label is at fault: the box holds the gold answer."""
    chains = rows("math_boxed_cots.jsonl")
    disputed = {r["id"] for r in chains if judged(r["response"], r["gold"]).acc != float(r["expected"])}
    assert len(chains) == 320
    assert disputed == {"72:7", "3:0", "3:2"}
    boxed = {r["id"]: (r["gold"], extract_answer(r["response"])) for r in chains if r["id"] in disputed}
    assert boxed["72:7"] == ("10{,}000", "10000")
    assert boxed["3:0"] == boxed["3:2"] == (r"\text{4:30 p.m.}", r"4:30 \text{ p.m.}")


def test_normaliser_cases() -> None:
    """9 cases are the released scorer's; the others, of a later normaliser, are for strict to call equal."""
    cases = rows("dapo_normalise_cases.json")
    pairs = [(case["raw"], case["expected"]) if "raw" in case else (case["given"], case["gt"]) for case in cases]
    assert len(pairs) == 22
    for raw, expected in pairs[:9]:
        assert judged(f"Answer: {raw}", expected, COMPAT).prediction == expected
    for raw, expected in pairs[8:]:
        assert judged(f"Answer: {raw}", expected).acc == 1.0


# --- verl_compat's normal form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a = b = an 3 square units", "3"),
        ("the $x$ and $y$ pair", "x"),
        (r"5 \text{m}", "5"),
        (r"\textbf{x}\overline{y}", "xy"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\sqrt2 + \frac34", r"\sqrt{2}+\frac{3}{4}"),
        (r"90^\circ", "90"),
        ("12,34", "1234"),
        ("12,x", "12,x"),
    ],
)
def test_released_normal_form(raw: str, expected: str) -> None:
    assert judged(f"Answer: {raw}", "", COMPAT).prediction == expected


def test_released_window_is_300_characters() -> None:
    answer = "Answer: 5\n"
    assert judged(answer + "x" * (300 - len(answer)), "5", COMPAT).acc == 1.0
    assert judged(answer + "x" * (301 - len(answer)), "5", COMPAT).status == "no_answer"


# --- cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unit", ["x ", "$1", "{", r"\boxed{", r"\text{", r"\frac1", "=1", " ", "1", ",234", "1,", "Answer: "]
)
@pytest.mark.parametrize("options", [STRICT, COMPAT])
def test_a_long_response_is_judged_before_the_limit_of_a_test(unit: str, options: RewardOptions) -> None:
    """Passes that are linear in the length take a second or so; one that is quadratic would take hours."""
    text = "Answer: " + unit * (2**22 // len(unit))
    verdict = judged(text, text if options is COMPAT else "34", options)
    assert verdict.acc == 0.0 or options is COMPAT


def test_answers_that_cannot_be_verified() -> None:
    for answer in ("34", "025", r"\frac{1}{2}", r"\infty", r"\text{Evelyn}", "x^2 + 1", "10{,}000"):
        assert check_answer(answer) is None
    for answer in ("", "  \n", "$$", r"\boxed{}", "..."):
        reason = check_answer(answer)
        assert reason and "\n" not in reason


def test_answers_that_are_no_number() -> None:
    for answer in ("34", "-3", "025", "1.5", r"\frac{1}{2}", "10{,}000", r"336^\circ", "9" * 9000, "5 cm"):
        assert require_number(answer) is None
    for answer in ("", "$$", r"\text{Evelyn}", "x + 1", "1, 2", "2 1", "1/0", r"2\pi", "34 or 35"):
        reason = require_number(answer)
        assert reason and "\n" not in reason
