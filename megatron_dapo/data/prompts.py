"""From rows to prompts: columns, templates, length, duplicates; and a resumable cursor over shuffled epochs.

A row becomes a prompt that can be trained on, or is counted (a duplicate, dropped), or is refused with its file, its number
and the reason: when it is read, never in the middle of a run.

Two kinds of rows are known by sight: those of the DAPO data sets (``prompt`` as chat messages, ``reward_model``) and plain
ones (``question`` or ``problem``, and ``answer``; GSM8K's answers end in ``#### 72``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_dapo.config import DataOptions
from megatron_dapo.data.chat import parse_keywords
from megatron_dapo.data.labels import answer_in, comparable
from megatron_dapo.data.length import fit
from megatron_dapo.data.rows import Row, RowError, check_unicode, first_line, kind_of, one_line, plain, read_rows
from megatron_dapo.data.text import DAPO_TEMPLATE, FOR_TEMPLATES, NOT_TEXT, PromptText, wording
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.types import InputError, IntArray, Prompt

__all__ = ["DAPO_TEMPLATE", "CheckAnswer", "PromptCursor", "check_data_options", "load_eval_prompts", "load_prompts"]

CheckAnswer = Callable[[str], str | None]
"""None where the answer can be verified, else why not."""
IsChecked = Callable[[str], bool]
"""True for a data source whose answers are to be checked."""

Note = Callable[[str], None]
"""Told in a line what became of the rows."""

INPUT_KEYS = ("prompt", "question", "problem")
LABEL_KEYS = ("reward_model.ground_truth", "answer", "label", "solution", "ground_truth")


def load_prompts(
    paths: list[str],
    options: DataOptions,
    tokenizer: Tokenizer,
    check_answer: CheckAnswer | None = None,
    note: Note = print,
    is_checked: IsChecked = lambda source: True,
) -> list[Prompt]:
    """All prompts of the files, in order, filtered as the options say; ``note`` is told what was filtered.

    ``check_answer`` is asked about the answers of the data sources that ``is_checked`` names.
    Raises:
        InputError: a file or row is not as the options say, or nothing is left.
    """
    reader = _Reader(options, tokenizer, check_answer, is_checked)
    for path in paths:
        for row in read_rows(path):
            try:
                reader.add(row)
            except RowError as error:
                raise InputError(f"{row.place}: {one_line(str(error))}") from None
    prompts = reader.prompts()
    if not prompts:
        raise InputError(
            f"{', '.join(paths)}: no prompt is left of {reader.summary(0)}; change the files or these options"
        )
    note(f"{', '.join(paths)}: {reader.summary(len(prompts))}")
    return prompts


def load_eval_prompts(
    paths: list[str],
    options: DataOptions,
    tokenizer: Tokenizer,
    check_answer: CheckAnswer | None = None,
    note: Note = print,
    is_checked: IsChecked = lambda source: True,
) -> list[Prompt]:
    """Evaluation problems, each once: files that repeat them (aime-2024.parquet holds 30 problems 32 times) are folded,
    because the number of samples is --n-samples-per-eval-prompt's."""
    once = dataclasses.replace(options, dedup_prompts=True)
    return load_prompts(paths, once, tokenizer, check_answer, note, is_checked)


def check_data_options(options: DataOptions) -> None:
    """Refuse what no file could make right.

    Raises:
        InputError: a wording without the place of the problem, a pattern that is none, keywords that are no JSON object.
    """
    if "{problem}" not in wording(options):
        raise InputError(
            f"--prompt-template {options.prompt_template!r}: no {{problem}} in it; use dapo, none, or a text with {{problem}}"
        )
    try:
        re.compile(options.label_regex or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"--label-regex {options.label_regex!r}: not a regular expression ({error})") from None
    if parse_keywords(options.chat_template_kwargs) and options.apply_chat_template is False:
        raise InputError("--chat-template-kwargs: nothing reads them with --no-apply-chat-template; leave one out")


class _Reader:
    """Takes rows, keeps prompts, counts the rest."""

    def __init__(
        self, options: DataOptions, tokenizer: Tokenizer, check_answer: CheckAnswer | None, is_checked: IsChecked
    ) -> None:
        check_data_options(options)
        self.options, self.tokenizer, self.check_answer, self.is_checked = options, tokenizer, check_answer, is_checked
        self.text = PromptText(options, tokenizer)
        self.kept: dict[str, Prompt] = {}
        self.rows = self.duplicates = self.cut = self.dropped = self.unknown = 0
        self.first_dropped = ""
        self.seen: dict[Any, bool] = {}
        """Rows, by all that makes them the same: True where such a row was dropped."""
        self.answers: dict[str, dict[str, tuple[str, str]]] = {}
        """Text -> its different answers, each with the place of its first row."""

    def add(self, row: Row) -> None:
        """Keep the row's prompt, or count it.

        Raises:
            RowError: it cannot be trained on.
        """
        self.rows += 1
        question = _value(row, self.options.input_key, INPUT_KEYS, "--input-key")
        answer = answer_in(_value(row, self.options.label_key, LABEL_KEYS, "--label-key"), self.options.label_regex)
        as_it_is = (repr([question, *map(row.get, (*FOR_TEMPLATES, *NOT_TEXT))]), answer)
        if self._is_known(as_it_is, row):  # before anything costly: published files hold a row 100 times
            return
        self._check(answer, row)
        text = self.text(row, question)
        check_unicode("prompt", text)
        rendered = (text, comparable(answer))
        if self._is_known(rendered, row):
            return
        self._compare_answers(text, answer, row)
        limit, overflow = self.options.rollout_max_prompt_len, self.options.prompt_overflow
        try:
            ids, longer = fit(self.tokenizer, text, self.text.template is None, limit, overflow)
        except RowError:
            raise
        except BaseException as error:  # a vocabulary without a token for what it does not know; a panic, in its Rust
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RowError(f"the tokenizer cannot read its prompt: {first_line(error)}") from None
        self.seen[as_it_is] = self.seen[rendered] = ids is None
        if ids is None:
            self._drop(row)
        elif not ids:
            raise RowError("its prompt has no tokens")
        else:
            self.cut += longer
            self.unknown += self.tokenizer.unknown_id in ids
            self._keep(row, text, ids, answer)

    def _is_known(self, key: Any, row: Row) -> bool:
        """True for a duplicate, which is counted."""
        if not self.options.dedup_prompts or key not in self.seen:
            return False
        if self.seen[key]:
            self._drop(row)
        else:
            self.duplicates += 1
        return True

    def _drop(self, row: Row) -> None:
        self.dropped += 1
        self.first_dropped = self.first_dropped or row.place

    def _keep(self, row: Row, text: str, ids: list[int], answer: str) -> None:
        source, extra = _source(row)
        uid = self._uid(row, source)
        for what, value in (("answer", answer), ("data_source", source), ("extra_info", [uid, extra])):
            check_unicode(what, value)
        self.kept[uid] = Prompt(uid, text, tuple(ids), answer, source, extra)

    def _uid(self, row: Row, source: str) -> str:
        index = row.get("extra_info.index")
        uid = f"{source}:{index if index is not None else row.number}"
        if uid in self.kept:
            uid = f"{uid}#{row.number}@{row.path}"
        unique, again = uid, 1
        while unique in self.kept:  # a file that is listed several times
            again += 1
            unique = f"{uid}#{again}"
        return unique

    def _check(self, answer: str, row: Row) -> None:
        """Refuse an answer that no response could be verified against."""
        if self.check_answer is None or not self.is_checked(_source(row)[0]):
            return
        try:
            reason = self.check_answer(answer)
        except (ValueError, RecursionError, OverflowError) as error:
            reason = f"it cannot be read ({type(error).__name__})"
        if reason is not None:
            shown = answer if len(answer) <= 80 else f"{answer[:80]}..."
            raise RowError(f"answer {shown!r}: {reason}; fix the row or remove it")

    def _compare_answers(self, text: str, answer: str, row: Row) -> None:
        known = self.answers.setdefault(text, {})
        known.setdefault(comparable(answer), (answer, row.place))
        if len(known) > 1 and self.options.conflicting_answers == "error":
            first, place = next(iter(known.values()))
            raise RowError(
                f"the problem of {place}, whose answer is {first!r:.60}, with the answer {answer!r:.60}; fix the rows, or set "
                "--conflicting-answers keep or drop"
            )

    def prompts(self) -> list[Prompt]:
        """What is left when all rows were added."""
        wanted = self.options.conflicting_answers != "drop"
        return [p for p in self.kept.values() if wanted or len(self.answers[p.text]) == 1]

    def summary(self, left: int) -> str:
        """What became of the rows."""
        limit, template = self.options.rollout_max_prompt_len, self.text.template
        parts = [f"{self.rows} rows, {left} prompts {'through the chat template' if template else 'as raw text'}"]
        if self.duplicates:
            parts.append(f"{self.duplicates} of {self.rows} rows are duplicates")
        if self.dropped:
            parts.append(
                f"{self.dropped} of {self.rows} rows dropped: longer than --rollout-max-prompt-len {limit} tokens (first: "
                f"{self.first_dropped})"
            )
        if self.cut:
            parts.append(f"{self.cut} of {self.rows} prompts cut to their last {limit} tokens")
        if self.unknown:
            parts.append(f"{self.unknown} prompts hold characters that the tokenizer does not know")
        if conflicts := [list(a.values()) for a in self.answers.values() if len(a) > 1]:
            (answer, place), (other, there) = conflicts[0][:2]
            what = "dropped" if self.options.conflicting_answers == "drop" else "kept (see --conflicting-answers)"
            parts.append(
                f"{len(conflicts)} problems with different answers {what}, first {place} ({answer!r:.40}) and {there} "
                f"({other!r:.40})"
            )
        if template:
            parts += [f"the key {k!r} of messages not rendered in {n} rows" for k, n in template.left_out.items()]
        return "; ".join(parts)


def _value(row: Row, key: str, known: tuple[str, ...], flag: str) -> Any:
    keys = known if key == "auto" else (key,)
    for candidate in keys:
        if (value := row.get(candidate)) is not None:
            return value
    missing = " or ".join(repr(k) for k in keys)
    raise RowError(f"no {missing} in it (it has {', '.join(row.fields)}); name the column with {flag}")


def _source(row: Row) -> tuple[str, dict[str, Any]]:
    """Data source and what a reward function may need beside the answer."""
    task, source, extra = row.get("metadata.source_dataset"), row.get("data_source"), row.get("extra_info")
    if isinstance(task, str) and source is None:
        return f"reasoning_gym/{task}", {"task": task, "entry": plain(row.fields)}
    if source is not None and not (isinstance(source, str) and source.isprintable()):
        raise RowError(f"its 'data_source' is {source!r:.40}, not one line of text; fix or remove it")
    if extra is not None and not isinstance(extra, dict):
        raise RowError(f"its 'extra_info' is {kind_of(extra)}, not an object; fix or remove it")
    return source or "default", plain(extra or {})


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
