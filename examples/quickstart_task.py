"""Data of the quick start: short sums, and a starting policy that knows how to work them out but rarely bothers.

The problems are reasoning-gym's ``chain_sum`` (four or five one-digit terms), kept where every running total lies in
0 .. 19, and written compactly: the prompt is ``4+3-2-1=``. Three disjoint sets of problems are drawn:

* ``warmup.jsonl``: demonstrations for plain next-token training, from a careless teacher. A share (``STEPS_SHARE``)
  write out every step, ``4+3=7;7-2=5;5-1=4;Answer: 4``, and each step slips by one with probability ``STEP_SLIP``;
  the others answer at once, ``Answer: 4``, and are off by one to four with probability ``GUESS_WRONG``.
* ``train.jsonl``: what DAPO trains on: problems and their answers, no demonstrations.
* ``heldout.jsonl``: what the policy is measured on, in neither of the others.

Ids are those of ``ALPHABET``'s characters plus whatever the tokenizer adds for padding and end of text; a
demonstration ends with end of text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.data.tokenizer import write_character_tokenizer

ALPHABET = "\n +-0123456789:;=Answer"
"""Every character that prompts and responses are made of (each once, in no particular order)."""
TERMS = (4, 5)
"""Fewest and most terms of a sum."""
LARGEST_TOTAL = 19
"""Running totals lie in 0 .. this."""
STEPS_SHARE = 0.3
"""Share of the demonstrations that write out the steps."""
STEP_SLIP = 0.05
"""Probability that a written step is off by one."""
GUESS_WRONG = 0.7
"""Probability that an answer given at once is off by one to four."""
BLOCK = 1_000_000
"""Problems of one seed; reasoning-gym draws item i of seed s as s + i, so seeds must be blocks apart."""


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Distinct ``chain_sum`` entries of reasoning-gym whose running totals all lie in 0 .. LARGEST_TOTAL."""
    import reasoning_gym  # type: ignore[import-untyped,unused-ignore]

    fewest, most = TERMS
    dataset = reasoning_gym.create_dataset(
        "chain_sum", min_terms=fewest, max_terms=most, min_digits=1, max_digits=1, size=BLOCK, seed=seed * BLOCK
    )
    seen: set[str] = set()
    for entry in dataset:
        expression = compact(entry)
        totals = list(itertools.accumulate(map(int, signed_terms(expression))))
        if expression not in seen and min(totals) >= 0 and max(totals) <= LARGEST_TOTAL:
            seen.add(expression)
            yield entry


def compact(entry: dict[str, Any]) -> str:
    """The entry's expression without spaces: ``4+3-2``."""
    return str(entry["metadata"]["expression"]).replace(" ", "")


def signed_terms(expression: str) -> list[str]:
    """``4+3-2`` -> ``["4", "+3", "-2"]``."""
    return re.findall(r"[+-]?\d+", expression)


def problem(entry: dict[str, Any]) -> dict[str, Any]:
    """A row of train.jsonl and heldout.jsonl; ``extra_info`` is what reasoning-gym's own scorer wants."""
    # a tuple would become a list in the file and make a read row differ from a made one
    plain_entry = json.loads(json.dumps(entry))
    return {
        "question": compact(entry) + "=",
        "answer": entry["answer"],
        "data_source": "chain_sum",
        "extra_info": {"task": "chain_sum", "entry": plain_entry},
    }


def demonstration(entry: dict[str, Any], rng: random.Random) -> dict[str, str]:
    """A row of warmup.jsonl: what the careless teacher writes below the entry's sum."""
    expression = compact(entry)
    if rng.random() < STEPS_SHARE:
        response = steps(signed_terms(expression), rng)
    else:
        off = rng.choice([-4, -3, -2, -1, 1, 2, 3, 4]) if rng.random() < GUESS_WRONG else 0
        response = f"Answer: {max(0, int(entry['answer']) + off)}"
    return {"prompt": expression + "=", "response": response}


def steps(terms: list[str], rng: random.Random) -> str:
    """The steps and the answer they lead to; a slip is carried on."""
    total, written = int(terms[0]), ""
    for term in terms[1:]:
        result = total + int(term)
        if rng.random() < STEP_SLIP:
            result += rng.choice([-1, 1])
        result = max(0, result)
        written += f"{total}{term}={result};"
        total = result
    return f"{written}Answer: {total}"


def make(out: Path, seed: int, num_warmup: int, num_train: int, num_heldout: int) -> None:
    """Write the three files into ``out``; the same arguments give the same bytes."""
    needed = num_heldout + num_train + num_warmup
    entries = list(itertools.islice(sums(seed), needed))
    assert len(entries) == needed, f"only {len(entries)} distinct sums for {needed} rows"
    heldout, train = entries[:num_heldout], entries[num_heldout : num_heldout + num_train]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "heldout.jsonl", [problem(entry) for entry in heldout])
    write(out / "train.jsonl", [problem(entry) for entry in train])
    write(out / "warmup.jsonl", [demonstration(entry, rng) for entry in entries[num_heldout + num_train :]])


def write(path: Path, rows: list[Any]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    summary = "Write the quick start's data: train.jsonl, heldout.jsonl and warmup.jsonl."
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into; made where absent")
    parser.add_argument("--seed", type=int, default=0, help="draws the problems and the teacher's slips")
    parser.add_argument("--num-warmup", type=int, default=8000, help="demonstrations")
    parser.add_argument("--num-train", type=int, default=2000, help="problems to train on")
    parser.add_argument("--num-heldout", type=int, default=256, help="problems to evaluate on")
    parser.add_argument("--tokenizer", type=Path, help="folder to write the character tokenizer into, where wanted")
    args = parser.parse_args(argv)
    if args.tokenizer:
        write_character_tokenizer(args.tokenizer, ALPHABET)
    make(args.out, args.seed, args.num_warmup, args.num_train, args.num_heldout)
    print(f"wrote {args.num_warmup} demonstrations, {args.num_train} + {args.num_heldout} problems to {args.out}")


if __name__ == "__main__":
    main()
