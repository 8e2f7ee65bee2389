"""Where does a mismatch come from? The log-probs that the engine gave to its samples, against second opinions on them.

python tools/compare_logprobs.py runs/x --step 12 --hf runs/x/hf/step_000012     transformers in fp32, on this machine
python tools/compare_logprobs.py runs/x --step 12 --url http://127.0.0.1:30000   a server that reads each sample as a prompt

Needs the step's samples (train with --dump-rollouts) and weights of the same version: step N is generated with the weights
after N steps, which --save-hf-interval 1 exports as hf/step_N. `python -m megatron_dapo serve --hf-checkpoint DIR` serves them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_dapo.config.recipe import read_recipe
from megatron_dapo.rollout.replay import load_step
from megatron_dapo.servers.control import ServerError, call, logprobs_of
from megatron_dapo.types import FloatArray, InputError

Scorer = Callable[[list[int]], list[float]]
"""Log-probs of every token of a sequence but the first."""


def main(argv: list[str] | None = None) -> int:
    """Print a line for every second opinion; 0, or 2 after one line about what is wrong with the request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, help="rollout step (default: the last one there)")
    parser.add_argument("--num", type=int, default=32, help="samples to score, spread over the step (default: 32)")
    parser.add_argument("--hf", type=Path, help="Hugging Face folder of the weights that generated the step")
    parser.add_argument(
        "--url", action="append", default=[], help="a server that holds them; may be given several times"
    )
    given = parser.parse_args(argv)
    try:
        if not (given.hf or given.url):
            raise InputError("nothing to compare with: give --hf DIR or --url URL")
        step, samples = samples_of(given.run, given.step, given.num)
        print(
            f"step {step}: {len(samples)} samples of weights {step}; differences from the engine's log-probs, in nats per token"
        )
        for url in given.url:
            print(f"{url}: {compare(samples, from_server(url, step))}")
        if given.hf:
            print(f"transformers, {given.hf}: {compare(samples, from_transformers(given.hf))}")
    except (InputError, ServerError) as error:
        print(f"compare_logprobs: error: {error}", file=sys.stderr)
        return 2
    return 0


def samples_of(run: Path, step: int | None, num: int) -> tuple[int, list[tuple[list[int], FloatArray]]]:
    """The step, and of ``num`` of its samples all ids and the engine's log-probs of the response: those that the weights of
    one version, the step's, wrote from end to end.

    Raises:
        InputError: nothing was dumped, nothing fits, or the engine's log-probs are at another temperature than 1.
    """
    step, groups = load_step(run, step)
    recipe = run / "recipe.toml"
    temperature = read_recipe(recipe).get("rollout_temperature", 1.0) if recipe.is_file() else 1.0
    if temperature != 1.0:
        raise InputError(
            f"{run}: its log-probs are at --rollout-temperature {temperature:g}; dump a step with 1.0 to compare"
        )
    found = [
        ([*group.prompt.token_ids, *sample.token_ids.tolist()], sample.logprobs)
        for group in groups
        for sample in group.samples
        if sample.weight_version == step and not sample.spans and sample.length
    ]
    if not found:
        raise InputError(f"{run}: no sample of step {step} was written by the weights of version {step} alone")
    return step, found[:: max(1, len(found) // num)][:num]


def compare(samples: list[tuple[list[int], FloatArray]], score: Scorer) -> str:
    """The differences over all response tokens, and where the largest is."""
    gaps = [np.abs(np.array(score(ids)[-len(theirs) :]) - theirs) for ids, theirs in samples]
    every = np.concatenate(gaps)
    worst = max(range(len(gaps)), key=lambda i: float(gaps[i].max()))
    place = int(gaps[worst].argmax())
    return f"mean {every.mean():.2e}, largest {every.max():.2e} (sample {worst + 1}, token {place + 1} of its response)"


def from_server(url: str, version: int) -> Scorer:
    """A server's opinion of a sequence that it reads, and does not write.

    Raises:
        InputError: it says that it holds other weights.
    """
    held = call(url, "/model_info").get("weight_version")
    if held not in (str(version), "default"):  # what a server says that nothing was published to
        raise InputError(f"{url} holds weights {held}, the samples are of {version}")
    return lambda ids: logprobs_of(url, ids)


def from_transformers(folder: Path) -> Scorer:
    """The opinion of transformers in fp32, on this machine's GPU where there is one.

    Raises:
        InputError: ``folder`` is no checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json there, so no Hugging Face checkpoint")
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()

    def score(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logp = model(torch.tensor([ids], device=device)).logits[0, :-1].log_softmax(-1)
        chosen: list[float] = logp.gather(1, torch.tensor(ids[1:], device=device)[:, None])[:, 0].tolist()
        return chosen

    return score


if __name__ == "__main__":
    sys.exit(main())
