"""Answers are found, typed and compared by type: a table of pairs judged in both directions, and properties."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config import RewardOptions
from megatron_dapo.rewards import RewardResult
from megatron_dapo.rewards.answers import symbolic
from megatron_dapo.rewards.answers.parse import parse
from megatron_dapo.rewards.math import (
    canonical,
    check_answer,
    equal_answers,
    extract_answer,
    math_reward,
    require_number,
)
from megatron_dapo.rewards.registry import prepare_reward
from megatron_dapo.types import InputError

STRICT = RewardOptions()
COMPAT = RewardOptions(verifier_mode="verl_compat")
DATA = Path(__file__).parents[2].parent / "shared" / "data"


def judged(response: str, answer: str, options: RewardOptions = STRICT) -> RewardResult:
    return math_reward(response, answer, {}, options)


def lines_of(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def table() -> list[tuple[str, str, bool, bool]]:
    """(gold, response, equal, in both directions) of the hand-written pairs."""
    found = []
    for line in (Path(__file__).parent / "answer_pairs.txt").read_text().splitlines():
        if line and not line.startswith("# "):
            sign = "  ==  " if "  ==  " in line else "  !=  "
            gold, response = line.removeprefix("> ").split(sign)
            found.append((gold, response, sign == "  ==  ", not line.startswith("> ")))
    return found


PAIRS = table()


# --- comparison ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gold", "response", "equal", "both"), PAIRS)
def test_pairs(gold: str, response: str, equal: bool, both: bool) -> None:
    assert equal_answers(gold, response) is equal, (parse(gold), parse(response))
    if both:
        assert equal_answers(response, gold) is equal, (parse(response), parse(gold))
    verdict = judged(f"Some steps.\nAnswer: {response}", gold)
    assert verdict.acc == float(equal)
    assert (verdict.prediction == canonical(gold)[:256]) is equal, (
        "right answers vote together, wrong ones never with them"
    )


def test_the_table_covers_every_kind_in_both_verdicts() -> None:
    assert len(PAIRS) >= 400
    for kind in ("number", "tuple", "set", "union", "relation", "choice", "text", "expression"):
        verdicts = {equal for gold, _, equal, _ in PAIRS if parse(gold).kind == kind}
        assert verdicts == {True, False}, kind


@given(st.sampled_from(PAIRS), st.sampled_from(["{}", "${}$", r"\boxed{{{}}}", r"$\boxed{{{}}}$.", " {} ", r"\({}\)"]))
@settings(max_examples=200, deadline=None)
def test_every_answer_equals_itself_however_it_is_wrapped(row: tuple[str, str, bool, bool], wrapping: str) -> None:
    for answer in row[:2]:
        if "$" in answer.replace("\\$", "") or "\\(" in answer or "boxed" in answer or "**" in answer:
            continue  # it brings its own delimiters
        assert equal_answers(answer, wrapping.format(answer))
        assert equal_answers(wrapping.format(answer), answer)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_numbers_in_all_spellings(above: int, below: int, off: int) -> None:
    spellings = [f"{above}", f"{above:,}", f"{above}.0", f"x = {above}", f"({above})", f"{above} apples", f"{above}%"]
    for a in spellings[:-2]:
        assert all(equal_answers(a, b) for b in spellings)
        assert not any(equal_answers(a, f"{above + off}{b}") for b in ("", " apples", ".0"))
    fraction = rf"\frac{{{above}}}{{{below}}}"
    assert equal_answers(fraction, f"{above}/{below}") and equal_answers(f"{2 * above}/{2 * below}", fraction)
    assert not equal_answers(fraction, f"{above + off}/{below}")


@given(st.lists(st.integers(-999, 999), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_sets_are_unordered_and_tuples_are_not(numbers: list[int], random: Any) -> None:
    shuffled = random.sample(numbers, len(numbers))
    inner, other = (", ".join(map(str, order)) for order in (numbers, shuffled))
    assert equal_answers(rf"\{{{inner}\}}", rf"\{{{other}\}}") and equal_answers(inner, rf"\{{{other}\}}")
    assert equal_answers(f"({inner})", f"({other})") is (numbers == shuffled)
    assert canonical(rf"\{{{inner}\}}") == canonical(other)
    assert not equal_answers(rf"\{{{inner}\}}", rf"\{{{inner}, 1000\}}")


@given(
    st.integers(-50, 50), st.integers(1, 50), st.sampled_from(["()", "[)", "(]", "[]"]), st.sampled_from(["()", "[)"])
)
@settings(max_examples=100, deadline=None)
def test_intervals_and_inequalities(low: int, width: int, ends: str, others: str) -> None:
    def written(brackets: str) -> list[str]:
        left, right = ("<" if b in "()" else r"\le" for b in brackets)
        mirrored = {"<": ">", r"\le": r"\geq"}
        interval = f"{brackets[0]}{low}, {low + width}{brackets[1]}"
        return [interval, rf"x \in {interval}", f"{low} {left} x {right} {low + width}",
                f"{low + width} {mirrored[right]} x {mirrored[left]} {low}"]  # fmt: skip

    for a in written(ends):
        assert all(equal_answers(a, b) is (ends == others) for b in written(others)), a


@given(st.sampled_from([p for p in PAIRS if any(c.isdigit() for c in p[0])]), st.integers(0, 99), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_another_digit_is_another_answer(row: tuple[str, str, bool, bool], place: int, off: int) -> None:
    gold = row[0]
    at = [i for i, c in enumerate(gold) if c.isdigit()]
    i = at[place % len(at)]
    changed = gold[:i] + str((int(gold[i]) + off) % 10) + gold[i + 1 :]
    if parse(changed).text == parse(gold).text or "\\log" in gold or "{}" in gold or "0" in (gold[i], changed[i]):
        return  # 025 and 125 aside, a unit's power (cm^2) is told apart below
    assert not equal_answers(gold, changed)


def test_a_unit_on_both_sides_must_agree_without_conversion() -> None:
    units = [
        "hours",
        "minutes",
        r"\text{ cm}",
        r"\text{ cm}^2",
        r"\text{ cm}^3",
        "dollars",
        "cents",
        "apples",
        r"^\circ",
        "kg",
    ]
    for a in units:
        for b in units:
            assert equal_answers(f"5 {a}", f"5 {b}") is (a == b), (a, b)
        assert equal_answers("5", f"5 {a}") and equal_answers(f"5 {a}", "5")
        assert not equal_answers("6", f"5 {a}")


def test_expressions_are_equal_everywhere_or_not_at_all() -> None:
    assert symbolic.equal("x^2-1", "(x-1)(x+1)")
    assert not symbolic.equal("|x|", "x"), "equal where x is positive"
    assert not symbolic.equal(r"\sqrt{2}", "1.41421356237309504880"), "near is not equal"
    assert not symbolic.equal("1999^{1999}", "1999^{1999}+1"), "the last of 6598 digits"
    assert not symbolic.equal("AB", "BA"), "matrices"
    for endless in (
        "9^{9^{9^9}}", "2^{10^{10}}", "99999999!", r"\binom{99999999}{5000000}", "2^{(9999^9)}", "(9999^{9999})^{9999}", "9^9^9",
        "999^{999!}", r"2^{\binom{999}{500}}", r"2^{9999 \cdot 9999 \cdot 9999}", r"2^{\frac{9^{99}}{1}}", "(999!)!", "3!!",
        "(((" * 100, "x" * 500, "(" * 13 + "x" + ")" * 13,
    ):  # fmt: skip
        assert not symbolic.readable(endless), endless
    for soon in (
        "e^{-x^2/2}",
        r"10^{\frac{-5+\sqrt{13}}{6}}",
        "n(n+1)2^{n-3}",
        "(x+1)^{10}",
        "1999^{1999}",
        r"\frac{n!}{2}",
    ):
        assert symbolic.readable(soon), soon


def test_a_missing_library_is_said_before_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_reward("math")
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None if name == "math_verify" else object())
    with pytest.raises(InputError, match=r"math_verify is missing.*pip install 'math-verify"):
        prepare_reward("math")


def test_numbers_never_load_the_library() -> None:
    """Nothing heavy is imported in a process that sees numbers, sets and intervals of numbers only."""
    code = (
        "import sys; from megatron_dapo.rewards.math import equal_answers, require_number;"
        r"assert equal_answers('1/2', '0.5') and equal_answers('[0, 1)', r'0 \le x < 1') and not equal_answers('5', '6 cm');"
        r"assert equal_answers('3', '1+2=3') and not equal_answers(r'\{1,2\}', '2, 3') and require_number('7') is None;"
        "print(sorted({'sympy', 'math_verify', 'torch'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_predictions_are_written_as_utf8_and_wrong_units_do_not_vote_with_right_ones() -> None:
    for response in ("Answer: \ud800", "Answer: 5 \udfff apples", "\\boxed{\ud83d}", "Answer: " + "\ud800" * 500):
        for options in (STRICT, COMPAT):
            judged(response, "5", options).prediction.encode()
    assert judged("Answer: 5 hours", "5 minutes") == RewardResult.of(False, "5 hour")
    assert judged("Answer: 5 minutes", "5 minutes").prediction == judged("Answer: 5", "5 minutes").prediction == "5"


ALPHABET = [
    "1", "2", "0", "1,000", "x", "(", ")", "[", "]", r"\{", r"\}", "{", "}", ", ", "=", "<", r"\le ", " or ", " and ", r"\cup ",
    r"\in ", r"\infty ", "+", "-", r"\pm ", "^", "_", r"\frac", r"\text{", "cm", "apples", r"\%", "$", r"\$", "(A)", "B: ", ".",
    " ", "&", "|", "!", " is ", "π", "≤", r"\boxed{", "Answer: ", "not ", r"^\circ", ":", "/", "**", "\n", "\ud800", "million",
]  # fmt: skip


@given(
    st.lists(st.sampled_from(ALPHABET), max_size=8),
    st.sampled_from(PAIRS),
    st.integers(0, 40),
    st.sampled_from(ALPHABET),
)
@settings(max_examples=200, deadline=None)
def test_any_two_texts_are_compared_alike_in_both_directions(
    parts: list[str], row: tuple[str, str, bool, bool], place: int, inserted: str
) -> None:
    gold, changed, free = row[0], row[0][:place] + inserted + row[0][place:], "".join(parts)
    for a, b in ((gold, changed), (gold, free), (free, free[::-1])):
        if not (parse(a).stated or parse(b).stated):  # m + n = 5 states 5, and 5 is no equation
            assert equal_answers(a, b) is equal_answers(b, a)
        assert equal_answers(b, b)
        check_answer(b)
        judged(b, a).prediction.encode()


# --- extraction ---------------------------------------------------------------------------------------------

NO_ANSWER = [
    r"First \boxed{5}. Then finally \boxed{",
    r"First \boxed{5}. Then finally \boxed{5",
    r"First \boxed{5}. Then finally \boxed{\frac{5}{1}",
    r"First \boxed{5}. Then finally \boxed",
    r"First \boxed{5}. Then finally \box",
    r"\boxed{5} and \boxed{}",
    r"\boxed{}",
    r"\boxed{ }",
    r"Answer: \boxed{}",
    r"\boxed{5} Answer: \boxed{5",
    r"\boxed{5} Answer:",
    "#### \n",
    "The answer is",
]


@pytest.mark.parametrize("response", NO_ANSWER)
def test_the_last_answer_counts_cut_off_or_empty(response: str) -> None:
    assert judged(response, "5") == RewardResult(-1.0, 0.0, "", "no_answer")


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"\boxed{ never closed ... so \boxed{7}", "7", True),
        (r"\boxed{5}, or better \boxed 7", "7", True),
        (r"\boxed{5}, or better \boxed 7", "5", False),
        (r"\boxed{1} and \boxed{2}", "1, 2", True),
        (r"\boxed{1} and \boxed{2}", "2", False),
        (r"$\boxed{34}$ or $\boxed{35}$", "35", False),
        (r"\boxed{34} \text{ or } \boxed{35}", "35", False),
        (r"\boxed{1}, \boxed{2}", "2", False),
        (r"\boxed{7}, \boxed{7}", "7", True),
        (r"\boxed{1} is wrong, so \boxed{2}", "2", True),
        ("The final answer is $13$. I hope it is correct.", "13", True),
        ("Final Answer: The final answer is $13$. I hope it is correct.", "13", True),
        ("The answer is 12. No, the answer is 13.", "13", True),
        ("The answer is 12. No, the answer is 13.", "12", False),
        ("Answer: 34, no wait, 35", "35", False),
        ("Answer: 34. Or 35", "34", False),
        ("Answer: \\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
        ("Answer: (E) a score", "E", True),
        ("The correct option is B.\nAnswer: Option B", "B", True),
        ("Answer: \\boxed{E: a score}", "E", True),
        ("Answer: B is correct", "B", True),
    ],
)
def test_what_a_response_answers(response: str, answer: str, right: bool) -> None:
    assert judged(response, answer).acc == float(right), extract_answer(response)


@pytest.mark.parametrize(
    "answer",
    ["9" * 5000, "9" * 5000 + "/7", r"\frac{" + "9" * 5000 + "}{7}", "1," * 3000 + "1", "(" * 8000, "[" * 900 + "]" * 900,
     r"\frac{1}{" * 300 + "1" + "}" * 300, "1e99999", "10^{99999}", "-" * 3000, "x = " * 900, r"\text{" * 600, "1 or " * 500,
     r"1 \cup " * 300, r"\pm" * 500, "¤" * 1000, "(a) " * 500, " is " * 900, "answer is " * 900],
    ids=lambda answer: f"{answer[:9]} x{len(answer)}",
)  # fmt: skip
def test_no_answer_is_too_large_or_too_deep(answer: str) -> None:
    """Python parses no integer of more than 4300 digits and nests no deeper than 1000 calls."""
    assert judged(f"Answer: {answer}", "5").acc == 0.0
    assert judged(f"\\boxed{{{answer}}}", "5").acc == 0.0
    assert equal_answers(answer, answer)
    check_answer(answer)
    require_number(answer)


# --- the row's answer ---------------------------------------------------------------------------------------

NO_ANSWERS = [
    "proof", "Proof.", "notfound", "not found", "NotFound", "not_found", "none", "None", "null", "n/a", "N/A", "NA", "N.A.",
    "unknown", "see solution", "See solution.", "see the proof above", "proof omitted", "The proof is complete", "Q.E.D.",
    "to be proven", "no answer", "not available", "not provided", "solution", "TBD", r"\text{proof}", r"\boxed{proof}",
    r"\text{N/A}", "$\\text{not found}$", "{'value': 2}", '{"a": 1}', "{1: 2}", "['a', 'b']", "[]", "{}", "()", "True", "False",
    "true", "nan", "NaN", "inf", "-inf", "Infinity", "array([1, 2])", "Decimal('1')", "tensor(2.)", "b'5'",
    "<object object at 0x7f11>", "[object Object]", r"\frac{", r"\frac{1}{", r"\frac{1}", r"\sqrt", "5}", r"\boxed{5", "(1, 2",
    "[1, 2", r"\left(1", "x =", "5 +", "3=7", "2+2=5", "1/0", r"\frac{1}{0}", "", "  \n", "$$", r"\boxed{}", "...", "?", "-",
]  # fmt: skip
ANSWERS = [
    "5", "x=5", r"\text{Evelyn}", r"\infty", "infinity", "Yes", "No", r"\emptyset", r"\{\}", r"\{1,2\}", "[0,1)", "(1,2]", "A",
    "(E)", "2x+z=1", r"\text{True}", "4:30 p.m.", r"\pi f'(0)", "e^{-x}", "a)", r"\frac12", r"\frac 59", r"\sqrt2", "n",
    "no solution", "none of the above", r"\$18.90", "58,500", "52_8", r"\mathbb{R}", "undefined", "proportional", "0", "|x|",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "1/0.5", "9" * 5000, "even", "navin", "-1", "unit circle", "information",
]  # fmt: skip


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_answers_that_are_none_are_refused(answer: str) -> None:
    reason = check_answer(answer)
    assert reason and "\n" not in reason
    assert require_number(answer) == reason, "what --answer-type any does not help is not said to be helped by it"


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[:20])
def test_answers_are_accepted(answer: str) -> None:
    assert check_answer(answer) is None


def test_what_is_a_number() -> None:
    for answer in (
        "x=5",
        "f(2)=3",
        "5%",
        r"5\%",
        "1 234",
        r"\$5",
        r"3.4 \times 10^{-31}",
        "13 apples",
        "(13)",
        r"\boxed{13}",
    ):
        assert require_number(answer) is None, answer
    for answer in ("2x+z=1", "m+n=34", "x>5", "1, 2", "E", "(1,2)", r"\pm 1", "4t", "5m", "[0,1]", "52_8", "10!", r"\sqrt{2}",
                   "x + 1 = 2", "0 < x < 1", r"\{5, 6\}", "Yes", "1:2"):  # fmt: skip
        assert require_number(answer), answer


# --- recorded data ------------------------------------------------------------------------------------------


def test_labelled_pairs_have_no_false_positive_and_few_false_negatives() -> None:
    pairs = [row for row in lines_of("verifier/math_equivalence_pairs.jsonl") if row["kind"] == "equivalence"]
    missed = 0
    for row in pairs:
        as_line, alone = (judged(text, row["gold"]).acc for text in (f"Answer: {row['pred']}", row["pred"]))
        assert row["expected"] or not (as_line or alone), row["id"]
        missed += row["expected"] and not max(as_line, alone)
    assert len(pairs) == 162
    assert missed <= 34  # 81 by spelling alone; the rest are golds of whole sentences, roundings and decimal commas


def test_answers_of_real_data_sets_are_read() -> None:
    """All of MATH-500, AIME and DeepMath can be verified against, but True and False, which a repr cannot be told from."""
    files = ("math/math500_aime24_aime25.jsonl", "math/deepmath_1500.jsonl")
    answers = {row["ground_truth"] for name in files for row in lines_of(name)}
    assert {a for a in answers if check_answer(a)} == {"True", "False"}
    assert all(equal_answers(a, a) for a in answers)


@pytest.mark.parametrize(
    ("name", "field", "digest"),
    [
        ("gsm8k_model_outputs", "response", "d9d615c01f654710be328b4892296e964b4cc31814ef17f9f0e9432ac8040ce2"),
        ("math_boxed_cots", "response", "ece5bccf6fd9848f3ae5fb7a6d4d2f7b919cb3d9412f8a232c450e5ca3bbe0b9"),
        ("math_equivalence_pairs", "pred", "28d30f4c763a0ec3c803b56c33498d92dcc84ef6a70ab7543752607570c8a76c"),
    ],
)
def test_verl_compat_is_what_it_always_was(name: str, field: str, digest: str) -> None:
    """Hash of all verdicts and predictions, taken before answers had types."""
    verdicts = hashlib.sha256()
    for row in lines_of(f"verifier/{name}.jsonl"):
        text, gold = row[field], row["gold"]
        for response in (text, f"Answer: {text[-250:]}", f"{text}\nAnswer: {gold} dollars."):
            result = judged(response, gold, COMPAT)
            verdicts.update(repr((result.score, result.acc, result.prediction, result.status)).encode())
    assert verdicts.hexdigest() == digest
