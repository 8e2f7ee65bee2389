"""From rows to prompts: columns, templates, length filter, duplicates; and a resumable cursor over shuffled epochs.

Two kinds of rows are known by sight: those of the DAPO data sets (``prompt`` as chat messages, ``reward_model``) and plain
ones (``question`` or ``problem``, and ``answer``; GSM8K's answers end in ``#### 72``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_dapo.config import DataOptions
from megatron_dapo.data.rows import Row, read_rows
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.types import InputError, IntArray, Prompt

CheckAnswer = Callable[[str], str | None]
"""None where the answer can be verified, else why not."""

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
"""The wording of the DAPO data sets."""

INPUT_KEYS = ("prompt", "question", "problem")
LABEL_KEYS = ("reward_model.ground_truth", "answer", "label", "solution", "ground_truth")


def load_prompts(
    paths: list[str], options: DataOptions, tokenizer: Tokenizer, check_answer: CheckAnswer | None = None
) -> list[Prompt]:
    """All prompts of the files, in order, filtered as the options say.

    Raises:
        InputError: a file or row is not as the options say, or nothing is left.
    """
    prompts: dict[str, Prompt] = {}
    seen: set[tuple[str, str]] = set()
    for path in paths:
        for row in read_rows(path):
            prompt = _prompt(row, options, tokenizer, check_answer)
            if prompt is None or (options.dedup_prompts and (prompt.text, prompt.answer) in seen):
                continue
            seen.add((prompt.text, prompt.answer))
            uid = prompt.uid if prompt.uid not in prompts else f"{prompt.uid}#{row.number}@{path}"
            prompts[uid] = Prompt(uid, prompt.text, prompt.token_ids, prompt.answer, prompt.data_source, prompt.extra)
    if not prompts:
        raise InputError(f"{', '.join(paths)}: no prompt is left; raise --rollout-max-prompt-len or change the files")
    return list(prompts.values())


def load_eval_prompts(
    paths: list[str], options: DataOptions, tokenizer: Tokenizer, check_answer: CheckAnswer | None = None
) -> list[Prompt]:
    """Evaluation problems, each once: files that repeat them (aime-2024.parquet holds 30 problems 32 times) are folded,
    because the number of samples is --n-samples-per-eval-prompt's."""
    import dataclasses

    return load_prompts(paths, dataclasses.replace(options, dedup_prompts=True), tokenizer, check_answer)


def _prompt(row: Row, options: DataOptions, tokenizer: Tokenizer, check_answer: CheckAnswer | None) -> Prompt | None:
    """The row's prompt; None where it is too long and dropped."""
    question = _value(row, options.input_key, INPUT_KEYS, "--input-key")
    text = _render(question, options, tokenizer, row)
    answer = _answer(row, options)
    if check_answer is not None and (reason := check_answer(answer)) is not None:
        raise InputError(f"{row.place}: answer {answer!r}: {reason}; mend the row, or set --answer-type any")
    ids = tokenizer.encode(text)
    limit = options.rollout_max_prompt_len
    if len(ids) > limit:
        if options.prompt_overflow == "drop":
            return None
        if options.prompt_overflow == "error":
            raise InputError(
                f"{row.place}: its prompt has {len(ids)} tokens, --rollout-max-prompt-len is {limit}; raise it, or set "
                "--prompt-overflow drop or truncate"
            )
        ids = ids[-limit:]
    source, extra = _source(row)
    index = row.get("extra_info.index")
    uid = f"{source}:{index if index is not None else row.number}"
    return Prompt(uid, text, tuple(ids), answer, source, extra)


def _value(row: Row, key: str, known: tuple[str, ...], flag: str) -> Any:
    keys = known if key == "auto" else (key,)
    for candidate in keys:
        if (value := row.get(candidate)) is not None:
            return value
    missing = " or ".join(repr(k) for k in keys)
    raise InputError(f"{row.place}: no {missing} in it (it has {', '.join(row.fields)}); name the column with {flag}")


def _render(question: Any, options: DataOptions, tokenizer: Tokenizer, row: Row) -> str:
    """The text the policy is given. Chat messages are taken as they are; a plain question goes into the template."""
    if isinstance(question, str):
        template = "dapo" if options.prompt_template == "auto" else options.prompt_template
        template = {"dapo": DAPO_TEMPLATE, "none": "{problem}"}.get(template, template)
        if "{problem}" not in template:
            raise InputError(
                f"--prompt-template {template!r}: no {{problem}} in it; use dapo, none, or a text with {{problem}}"
            )
        messages = [{"role": "user", "content": template.replace("{problem}", question)}]
    elif isinstance(question, list) and all(isinstance(m, dict) and "content" in m for m in question) and question:
        messages = question
    else:
        raise InputError(f"{row.place}: the prompt is neither text nor a list of chat messages; see --input-key")
    if options.apply_chat_template:
        return tokenizer.chat(messages)
    return "".join(m["content"] for m in messages)


def _answer(row: Row, options: DataOptions) -> str:
    label = str(_value(row, options.label_key, LABEL_KEYS, "--label-key"))
    if options.label_regex is not None:
        found = list(re.finditer(options.label_regex, label))
        if not found:
            raise InputError(f"{row.place}: --label-regex {options.label_regex!r} is nowhere in {label[-60:]!r}")
        return found[-1].group(1 if found[-1].re.groups else 0).strip()
    answer = label.rsplit("####", 1)[-1].strip()
    if not answer:
        raise InputError(f"{row.place}: its answer is empty; mend the row or remove it")
    return answer


def _source(row: Row) -> tuple[str, dict[str, Any]]:
    """Data source and what a reward function may need beside the answer."""
    task = row.get("metadata.source_dataset")
    if task is not None and row.get("data_source") is None:
        return f"reasoning_gym/{task}", {"task": task, "entry": row.fields}
    extra = row.get("extra_info")
    return str(row.get("data_source") or "default"), extra if isinstance(extra, dict) else {}


class PromptCursor:
    """An endless walk over the prompts, every epoch in a new seeded order.

    ``take(a)`` then ``take(b)`` is ``take(a + b)``, across epochs and across a resume.
    """

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool = True) -> None:
        assert prompts, "a cursor needs prompts"
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.epoch, self.offset = 0, 0
        uids = "\n".join(p.uid for p in prompts)
        self.fingerprint = hashlib.sha256(uids.encode()).hexdigest()[:16]
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> IntArray:
        if not self.shuffle:
            return np.arange(len(self.prompts))
        sequence = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
        return np.random.default_rng(sequence).permutation(len(self.prompts))

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; as many epochs as it takes."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self.offset == len(self.prompts):
                self.epoch, self.offset = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            step = self._order[self.offset : self.offset + n - len(taken)]
            taken += [self.prompts[i] for i in step]
            self.offset += len(step)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"epoch": self.epoch, "offset": self.offset, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            InputError: it was taken over other prompts.
        """
        if state["fingerprint"] != self.fingerprint:
            raise InputError(
                "--prompt-data: these are not the prompts the checkpoint was made with; give the same files and filters, or "
                "start a new --run-dir with --load"
            )
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self._order = self._order_of(self.epoch)
