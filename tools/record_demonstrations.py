"""Turn demonstrations into recorded rollouts, so that the trainer itself can do a supervised warm-up on them.

    python tools/record_demonstrations.py --demonstrations demos.jsonl --tokenizer-model DIR --out DIR --rollouts 10 --batch 2560
    python -m megatron_dapo train RECIPE.toml --load-rollouts DIR --policy-loss nll --old-logprobs none \
        --n-samples-per-prompt 1 --advantage-mean none --advantage-std none ...

A demonstration is a row {"prompt": ..., "response": ...}. Its prompt is rendered as training renders it (a text as it stands,
without the wording of a data set): through the tokenizer's chat template where it has one, else as raw text. It becomes a group
of one right sample, its response closed by the tokenizer's end of text; log-probs are NaN, for no engine drew it. Rows are
shuffled by --seed, again every epoch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from megatron_dapo.config import DataOptions
from megatron_dapo.data.prompts import PromptCursor
from megatron_dapo.data.rows import RowError, check_unicode, one_line, read_rows
from megatron_dapo.data.text import PromptText
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.rollout.replay import dump_rollouts
from megatron_dapo.types import Group, InputError, Prompt, Sample


def demonstration(prompt: Prompt, end: int, tokenizer: Tokenizer, order: int) -> Group:
    """A group of one right sample, out of a prompt whose ``extra`` holds the response."""
    ids = [*tokenizer.encode(prompt.extra["response"]), end]
    sample = Sample(
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        finish_reason="stop",
        weight_version=0,
        text=prompt.extra["response"],
        score=1.0,
        acc=1.0,
        status="ok",
    )
    return Group(prompt, [sample], order)


def read_demonstrations(path: str, options: DataOptions, tokenizer: Tokenizer) -> list[Prompt]:
    """The rows as prompts that carry their response.

    Raises:
        InputError: a row lacks prompt or response, or cannot be rendered.
    """
    prompts = []
    render = PromptText(options, tokenizer)
    for row in read_rows(path):
        prompt, response = row.get("prompt"), row.get("response")
        if not isinstance(prompt, str | list) or not isinstance(response, str):
            raise InputError(f"{row.place}: a demonstration has a 'prompt' (text or messages) and a text 'response'")
        try:
            text = render(row, prompt)
            for what, value in (("prompt", text), ("response", response)):
                check_unicode(what, value)
        except RowError as error:
            raise InputError(f"{row.place}: {one_line(str(error))}") from None
        ids = tuple(tokenizer.encode(text) if render.template else tokenizer.encode_raw(text))
        prompts.append(Prompt(f"demonstration:{row.number}", text, ids, "", "demonstration", {"response": response}))
    return prompts


def main(argv: list[str] | None = None) -> int:
    """Write the rollouts; 2 and one line where the input has to be fixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demonstrations", required=True, help="a .jsonl or .parquet file")
    parser.add_argument("--tokenizer-model", required=True, help="folder with the tokenizer.json")
    parser.add_argument("--out", required=True, help="folder for step_000000.jsonl.gz and so on")
    parser.add_argument("--rollouts", type=int, required=True, help="rollout steps to write (the recipe's num_rollout)")
    parser.add_argument("--batch", type=int, required=True, help="rows per step (the recipe's rollout_batch_size)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--apply-chat-template", action=argparse.BooleanOptionalAction, help="as of the training flag")
    parser.add_argument("--chat-template", help="as of the training flag")
    parser.add_argument("--chat-template-kwargs", help="as of the training flag")
    given = parser.parse_args(argv)
    options = DataOptions(
        prompt_template="none",
        apply_chat_template=given.apply_chat_template,
        chat_template_kwargs=given.chat_template_kwargs,
    )
    try:
        tokenizer = load_tokenizer(given.tokenizer_model, chat_template=given.chat_template)
        cursor = PromptCursor(read_demonstrations(given.demonstrations, options, tokenizer), given.seed)
        end = tokenizer.end_of_text
    except InputError as error:
        print(f"record_demonstrations: error: {error}", file=sys.stderr)
        return 2
    for step in range(given.rollouts):
        prompts = enumerate(cursor.take(given.batch), step * given.batch)
        dump_rollouts(Path(given.out), step, [demonstration(p, end, tokenizer, order) for order, p in prompts])
    print(f"{given.rollouts} steps of {given.batch} demonstrations in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
