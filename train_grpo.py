"""Anchored GRPO: a tool-using trip planner learns to beat a reference plan.

For each request the policy searches flights, trains, hotels, sights and restaurants with tools and ends
with one JSON plan. A program checks seven constraints; a judge compares the plans that pass with the
request's reference plan; the reward is 1 for a plan that passes and is preferred, else 0. Rewards are
normalised inside the group of plans for one request, and a clipped-ratio loss moves the tokens that the
policy itself wrote.

    python train_grpo.py                                     # built-in model and world, CPU, minutes
    python train_grpo.py --model Qwen/Qwen3-4B-Instruct-2507 --lora_r 16 --data DIR ...        # one GPU
    torchrun --nproc_per_node 4 train_grpo.py --model Qwen/Qwen3-4B-Instruct-2507 ...          # four
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
        train_grpo.py --model Qwen/Qwen3-4B-Instruct-2507 ...                                  # two nodes

--reward names what is rewarded: the paper's method, or what it is compared with. --references trains against
plans that another model made instead of the human ones (Syn-Anchored): the folder of an eval.py run over the
train split, of which the plans that pass every constraint are taken. --env travelplanner plans its trips;
--env musique, with --reward constraint, answers questions: the trained agent that Caddie's critic advises.

Source: anchored comparative feedback (Anchored GRPO, NeurIPS 2026); what the paper leaves open is in
docs/deviations.md. SFT on imputed traces and Anchored DPO are train_cmdpo.py's stages on data of
envs/triptailor_traces.py; Best-of-N is eval.py's.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from envs import BENCHMARKS, musique_make, trips
from envs.base import Call, Env, Message
from nanoplan import checkpoint, config, dist, lora, training, weights
from nanoplan.anchors import comparable, synthetic
from nanoplan.batch import pack, pad_micro_batches
from nanoplan.chat import Chat
from nanoplan.evaluate import check_room, evaluate, item_of, no_reference, rates, seed_for
from nanoplan.feedback import COMPARES, REWARDS, Asking, Feedback
from nanoplan.judges import open_judge
from nanoplan.llm import EndpointError
from nanoplan.log import before_after
from nanoplan.losses import policy_loss, token_weights
from nanoplan.model import Packed
from nanoplan.reward import group_advantages
from nanoplan.rollout import Budget, Rollout
from nanoplan.sampler import Sampler
from nanoplan.stats import lr_at


@dataclass(frozen=True)
class Config:
    # what is trained, on what
    model: str = "assets/tiny"  # HF folder or hub name
    env: Literal["triptailor", "travelplanner", "musique"] = "triptailor"  # what is planned
    data: str = ""  # the benchmark's folder; empty = the built-in world, made on first use; not travelplanner
    out: str = "runs/train_grpo"  # run folder; an earlier run there is moved aside unless resumed
    seed: int = 0  # of data order and sampling; a run is a function of its config
    resume: bool = False  # continue the run in --out from its newest checkpoint
    dry_run: bool = False  # print the first prompt, a tool turn, memory and sampling settings, and stop
    # reward
    reward: Literal["anchored", "constraint", "score", "ungated", "staged"] = "anchored"  # see feedback.py
    judge: str = "rubric"  # rubric, http://HOST/v1#MODEL, local:FOLDER, rm:FOLDER
    references: str = ""  # eval.py's folder of a model's plans for the train split; empty = the human ones
    # how much
    steps: int = 72  # rollout-and-update rounds
    prompts: int = 16  # requests per step over all ranks
    group: int = 8  # plans per request, K; Anchored GRPO
    updates: int = 1  # optimizer updates per step, each on its share of the requests
    eval_n: int = 256  # held-out requests measured before and after; 0 = none
    save_every: int = 20  # steps between checkpoints; one is always written at the end
    # episode limits, tokens and turns
    turns: int = 6  # model turns per episode, the plan included
    turn_tokens: int = 400  # sampled tokens per turn
    observation_tokens: int = 400  # tokens of one tool result
    total_tokens: int = 1200  # all tokens of an episode
    max_rows: int = 5  # rows per tool result; triptailor
    hours: bool = False  # whether sights come with their opening hours; triptailor
    top_k: int = 2  # passages of a search; musique
    rows: int = 0  # rows decoded at once per rank; 0 = all episodes of the step
    workers: int = 0  # threads for tools and judges; 0 = between steps, which keeps runs bit for bit
    temperature: float = 1.0  # of sampling and of the log-probs in the loss
    # loss
    clip_low: float = 0.2  # lower clip of the ratio; Anchored GRPO
    clip_high: float = 0.25  # upper clip of the ratio; Anchored GRPO
    dual_clip: float | None = None  # cap of the loss at negative advantage, times |A|; off, 3.0 in verl
    reduction: Literal["token", "sequence", "constant"] = "token"  # DAPO, GRPO, Dr. GRPO; open in the paper
    level: Literal["token", "sequence"] = "token"  # of the ratio; sequence = GSPO
    scale_rewards: bool = True  # divide advantages by the group's standard deviation
    truncated_is: float | None = None  # cap of the sampler-to-trainer importance weight; off
    kl_beta: float = 0.0  # weight of the k3 penalty towards the start model; Anchored GRPO has none
    # optimizer
    lr: float = 1e-3  # peak learning rate; 1e-5 to 1e-4 for LoRA on 4B
    warmup: int = 6  # steps; with fewer, AdamW's first large ones can undo the warm start
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    lr_floor: float = 0.1  # share of lr left at the end
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 0.06  # global norm at which gradients are clipped; the built-in model's is 0.04
    micro_tokens: int = 16384  # packed tokens per forward-backward
    # model
    lora_r: int = 0  # adapter rank; 0 = full fine-tuning
    lora_alpha: float = 32.0  # adapter scale is alpha / r
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = float32 on a CPU, bfloat16 on a GPU
    checkpointing: bool = False  # recompute activations in backward: less memory, a third more work


PER_TOKEN = ("clip_low", "clip_high", "entropy", "kl_old", "kl_ref")  # metrics that are means over tokens
SPLITS = {  # to train on, held out
    "triptailor": ("train", "test"),
    "travelplanner": ("train", "validation"),
    "musique": ("train", "dev"),
}
BUILTIN = {"triptailor": trips.builtin, "musique": musique_make.builtin}
UNJUDGED = ("constraint", "staged")  # rewards that ask no judge
MAY_CHANGE_ON_RESUME = {"resume", "dry_run", "save_every", "workers", "out", "micro_tokens"}


def judged(cfg: Config) -> bool:
    """Whether the judge can compare what is planned: the rubric knows TripTailor's plans only."""
    return cfg.env == "triptailor" or cfg.judge != "rubric"


def check(cfg: Config, world: int) -> None:
    """Refuse settings that cannot work together. Raises ValueError with what to change."""
    most = cfg.prompts // world
    if cfg.group < 2:
        raise ValueError(f"group={cfg.group}: a plan's reward is compared with its group; use 2 or more")
    if cfg.prompts % world or cfg.prompts < 1:
        raise ValueError(f"prompts={cfg.prompts} is no multiple of the {world} processes; change --prompts")
    if not 1 <= cfg.updates <= most:
        raise ValueError(f"updates={cfg.updates}: wanted 1 to {most}, one request per process each")
    if cfg.updates > 1 and cfg.truncated_is is not None:
        raise ValueError(f"truncated_is={cfg.truncated_is} needs --updates 1, a batch that is used once")
    if not cfg.temperature > 0:
        raise ValueError(f"temperature={cfg.temperature}: training samples; use a number above 0")
    if cfg.total_tokens > cfg.micro_tokens:
        raise ValueError(f"micro_tokens={cfg.micro_tokens} cannot hold total_tokens={cfg.total_tokens}")
    if cfg.env not in BUILTIN and not cfg.data:
        raise ValueError(f"data='': {cfg.env} has no built-in world; give its folder")
    if cfg.env != "triptailor" and cfg.references:
        raise ValueError(f"references={cfg.references} are for --env triptailor, not {cfg.env}")
    if cfg.env != "travelplanner" and cfg.reward == "staged":
        raise ValueError(f"reward=staged is for --env travelplanner; {cfg.env} has no stages")
    if not judged(cfg) and cfg.reward not in UNJUDGED:
        raise ValueError(f"judge=rubric knows triptailor's plans only; give another --judge for {cfg.env}")
    if cfg.steps < 1 or cfg.save_every < 1:
        raise ValueError(f"steps={cfg.steps}, save_every={cfg.save_every}: wanted 1 or more of both")


def check_fit(cfg: Config, chat: Chat, model, train: list) -> None:
    """Refuse a model and a world on which no episode could work. Raises ValueError with what to change."""
    if not train:
        raise ValueError(f"{cfg.data or 'the built-in world'} has no train requests; give another --data")
    check_room(chat, model, train[0], total_tokens=cfg.total_tokens)


def compute_dtype(cfg: Config) -> torch.dtype:
    """In which the model computes."""
    return weights.dtype_named(cfg.dtype, dist.device())


def load(cfg: Config):
    """The policy on this rank, its chat, and the requests to train on and to hold out."""
    chat, model = training.load_trained(
        cfg.model, dtype=compute_dtype(cfg), checkpointing=cfg.checkpointing, lora_r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha, seed=cfg.seed,
    )  # fmt: skip
    train, held_out = requests(cfg)
    check_fit(cfg, chat, model, train)
    return chat.folder, chat, model, train, held_out


def requests(cfg: Config) -> tuple[list[Env], list[Env]]:
    """Requests to train on, and held out. Raises ValueError if the reward compares with plans that no request
    has."""
    data = Path(cfg.data) if cfg.data else BUILTIN[cfg.env]()
    options = {
        "triptailor": {"max_rows": cfg.max_rows, "hours": cfg.hours}, "musique": {"top_k": cfg.top_k}
    }.get(cfg.env, {})  # fmt: skip
    load, (learn, hold) = BENCHMARKS[cfg.env].load, SPLITS[cfg.env]
    train = load(learn, data, **options)
    held_out = load(hold, data, n=cfg.eval_n, seed=0, **options) if cfg.eval_n else []
    total = len(train)
    if cfg.references:
        train = synthetic(train, cfg.references)
    if cfg.reward in COMPARES and train:
        train, reasons = comparable(train)
        if not train:
            raise ValueError(f"{total} train requests without a reference plan, the first: {reasons[0]}")
    if len(train) < total and dist.is_main():
        print(f"{len(train)} of {total} train requests have a reference plan; the others are left out")
    return train, held_out


def records(step: int, episodes, feedback: Feedback, chat: Chat) -> list[dict]:
    """Lines of trajectories.jsonl, over all ranks: what each episode was, with ids and mask."""
    rows, known = [], (feedback.verdicts, feedback.outcomes, feedback.rewards)
    for episode, verdict, outcome, reward in zip(episodes, *known, strict=True):
        trajectory = episode.trajectory
        row = {"step": step, "member": episode.member, "reward": reward}
        row |= item_of(episode, verdict, outcome, None if outcome == "error" else float(outcome == "win"))
        row["verdict"] = row.pop("strict") | {"severity": row.pop("severity")}
        row |= {"text": chat.decode(trajectory.ids), "ids": trajectory.ids}
        rows.append(row | {"sampled": [int(sampled) for sampled in trajectory.sampled]})
    return dist.gather_objects(rows)


def pick(num_requests: int, cfg: Config, step: int) -> list[int]:
    """Indices of the requests of a step: a pure function of (seed, step), each request once per epoch."""
    places = (divmod(at, num_requests) for at in range((step - 1) * cfg.prompts, step * cfg.prompts))
    return [training.epoch_order(num_requests, str(cfg.seed), epoch)[index] for epoch, index in places]


def micro_loss(model, batch, counts: dict[str, float], cfg: Config, reference):
    """This rank's share of the loss in one micro-batch, and sums over its tokens for the log.

    counts  tokens and sequences of the whole update, over ranks and micro-batches
    """
    inputs = (batch.ids, batch.positions, Packed(batch.cu_seqlens, batch.max_len), batch.targets)
    options = {"rows": batch.rows, "temperature": cfg.temperature}
    ref_logp = None
    if cfg.kl_beta:
        with torch.no_grad(), lora.adapters_off(model) if cfg.lora_r else contextlib.nullcontext():
            ref_logp = (reference or model)(*inputs, **options)[0]
    logp, entropy = model(*inputs, **options)
    weight = token_weights(
        batch, reduction=cfg.reduction, num_tokens=int(counts["tokens"]),
        num_sequences=int(counts["sequences"]),
        max_tokens_per_sequence=min(cfg.turns * cfg.turn_tokens, cfg.total_tokens),
    )  # fmt: skip
    loss, sums = policy_loss(
        logp, batch, weights=weight, clip_low=cfg.clip_low, clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip, ref_logp=ref_logp, kl_beta=cfg.kl_beta, level=cfg.level,
        truncated_is=cfg.truncated_is,
    )  # fmt: skip
    gap = (logp.detach() - batch.old_logp).abs()  # of sampler and trainer, before the step's first update
    sums |= {"loss": loss.detach(), "entropy": entropy.detach().sum(), "gap_sum": gap.sum()}
    return loss, sums | {"gap_max": gap.max() if len(gap) else gap.sum()}


def update(model, optimizer, trajectories, advantages, cfg: Config, *, reference=None) -> dict[str, float]:
    """One optimizer update on this rank's trajectories; what is returned is summed over all of them."""
    device = dist.device()
    batches = pack(
        trajectories, advantages, max_tokens=cfg.micro_tokens, device=device, keep_zero=cfg.kl_beta > 0
    )
    own = {"tokens": sum(len(b.rows) for b in batches), "sequences": sum(len(b.index) for b in batches)}
    counts = dist.sum_over_ranks(own)
    batches = pad_micro_batches(batches, dist.max_over_ranks(max(1, len(batches))), device=device)
    parts = []
    for i, batch in enumerate(batches):
        loss, sums = micro_loss(model, batch, counts, cfg, reference)
        dist.backward(loss, model, last=i == len(batches) - 1)
        parts.append(sums)
    dist.sync_grads(model)
    maxes = ("ratio_max", "gap_max")
    total = {k: (max if k in maxes else sum)(float(p[k]) for p in parts) for k in parts[0]}
    out = dist.sum_over_ranks(total, maxes=maxes)
    return out | training.take_step(model, optimizer, max_norm=cfg.max_grad_norm, wanted=counts["tokens"] > 0)


def totals(episodes, feedback: Feedback, advantages, times, cfg: Config) -> dict[str, float]:
    """Counts and times of a step's rollout, over all ranks and all episodes, before any filter."""
    outcomes = feedback.outcomes
    known = [reward for reward in feedback.rewards if reward is not None]
    groups = [advantages[i : i + cfg.group] for i in range(0, len(advantages), cfg.group)]
    sampled = sum(e.trajectory.num_sampled for e in episodes)
    broken = sum(e.trajectory.broken for e in episodes)
    own = {
        "episodes": len(episodes), "rewarded": len(known), "reward_sum": sum(known),
        "valid": sum(v.passed for v in feedback.verdicts), "wins": outcomes.count("win"),
        "env_errors": broken, "judge_errors": outcomes.count("error") - broken, "groups": len(groups),
        "constant": sum(not any(group) for group in groups), "malformed": sum(e.malformed for e in episodes),
        "calls": sum(e.calls for e in episodes), "turns": sum(e.turns for e in episodes),
        "truncated": sum(e.trajectory.truncated for e in episodes), "sampled": sampled,
        "observed": sum(len(e.trajectory.ids) for e in episodes) - sampled, "peak_gb": training.peak_gb(),
    }  # fmt: skip
    return dist.sum_over_ranks(own | times, maxes=("peak_gb", *times))


def metrics(total: dict[str, float], shares: list[dict[str, float]], lr: float) -> dict[str, float]:
    """One line of metrics.jsonl from the rollout's totals and the sums of the step's updates.

    Rates are over all episodes. clip_low, clip_high (shares of tokens), entropy, kl_old and kl_ref (nats) are
    means over trained tokens; loss and grad_norm means over updates; the gap is that of the first update.
    """
    episodes, tokens = max(1, total["episodes"]), sum(share["tokens"] for share in shares)
    per_token = {name: sum(share[name] for share in shares) / max(1, tokens) for name in PER_TOKEN}
    mean = {name: sum(share[name] for share in shares) / len(shares) for name in ("loss", "grad_norm")}
    return {
        "loss": mean["loss"], "reward_mean": total["reward_sum"] / max(1, total["rewarded"]),
        "valid_rate": total["valid"] / episodes, "win_rate": total["wins"] / episodes,
        "constant_groups": total["constant"] / max(1, total["groups"]),
        "judge_errors": total["judge_errors"], "env_errors": total["env_errors"],
        "malformed_calls": total["malformed"] / max(1, total["calls"]),
        "calls_per_episode": total["calls"] / episodes, "turns": total["turns"] / episodes,
        "truncated": total["truncated"] / episodes, "tokens_sampled": total["sampled"],
        "tokens_observed": total["observed"], "tokens_trained": tokens, **per_token,
        "ratio_max": max(share["ratio_max"] for share in shares),
        "logp_gap_mean": shares[0]["gap_sum"] / max(1, shares[0]["tokens"]),
        "logp_gap_max": shares[0]["gap_max"], "grad_norm": mean["grad_norm"],
        "skipped": sum(share["skipped"] for share in shares), "lr": lr,
        "sample_tokens_per_s": total["sampled"] / max(1e-9, total["sample_s"]),
        "train_tokens_per_s": tokens / max(1e-9, total["train_s"]),
        **{name: total[name] for name in ("peak_gb", "wait_s", "sample_s", "score_s", "train_s")},
    }  # fmt: skip


def headline(row: dict) -> str:
    """The line of a step."""
    return (
        f"step {row['step']:4d}  reward {row['reward_mean']:.3f}  valid {row['valid_rate']:.3f}  "
        f"win {row['win_rate']:.3f}  loss {row['loss']:+.4f}  gap {row['logp_gap_max']:.1e}  "
        f"grad {row['grad_norm']:.2f}  {row['sample_s']:.1f}+{row['train_s']:.1f} s"
    )


def dry_run(cfg: Config, chat: Chat, model, env, sampler: Sampler) -> None:
    """Print what a run would do first: prompt, a tool turn, memory, sampling settings."""
    messages = env.reset()
    call = {
        "triptailor": lambda: Call("search_hotels", {"city": env.request.destination}),
        "travelplanner": lambda: Call("AttractionSearch", {"city": env.structured().org}),
        "musique": lambda: Call("search", {"query": env.question.text}),
    }[cfg.env]()
    turn = [Message("assistant", "", [call]), *env.step("", [call])[0]]
    print("--- first prompt, then a tool turn (the call is ours, the answer the world's)")
    print(chat.render([*messages, *turn], env.tools, prompt=True))
    num_params = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gb = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9,
        "gradients and AdamW": 12 * trained / 1e9 / (1 if cfg.lora_r else dist.world()),
        "KV cache": sampler.cache_gb,
    }
    print("--- memory per rank, GB, activations apart")
    print("\n".join(f"{name:22} {value:8.3f}" for name, value in gb.items()))
    length = len(chat.open(messages, env.tools))
    print(f"--- {num_params:,} parameters, {trained:,} trained; {length} tokens in the first prompt")
    print(f"--- sampling: temperature {cfg.temperature}, no top-p, top-k, min-p or penalties")
    print(f"    stop ids {sorted(chat.stop_ids)}, at most {cfg.turn_tokens} tokens a turn")
    print(f"    generation_config.json, read for stop ids only: {chat.generation_config}")


def main(cfg: Config) -> dict:
    """Train, and return what summary.json holds."""
    dist.init(cfg.seed)
    check(cfg, dist.world())
    dist.catch_sigterm()
    folder, chat, model, train, held_out = load(cfg)
    judge = open_judge(cfg.judge, cache=Path(cfg.out).parent / "judge_cache", device=dist.device())
    if cfg.reward not in UNJUDGED and hasattr(judge, "probe"):
        judge.probe()
    slots = range(dist.rank(), cfg.prompts, dist.world())  # of a step's requests, those of this rank
    sampler = Sampler(
        model, rows=cfg.rows or len(slots) * cfg.group, max_len=cfg.total_tokens,
        temperature=cfg.temperature, dtype=compute_dtype(cfg),
    )  # fmt: skip
    budget = Budget(cfg.turns, cfg.turn_tokens, cfg.observation_tokens, cfg.total_tokens)
    rollout = Rollout(sampler, chat, budget, workers=cfg.workers)
    if cfg.dry_run:
        if dist.is_main():
            dry_run(cfg, chat, model, train[0], sampler)
        return {}
    optimizer = training.adamw(model, lr=cfg.lr, weight_decay=cfg.weight_decay)
    reference = None
    if cfg.kl_beta and not cfg.lora_r:  # with adapters the reference is the model without them
        reference = weights.load_model(
            folder, dtype=compute_dtype(cfg), device=dist.device(), num_ids=chat.num_ids
        ).requires_grad_(False)
    compared = judged(cfg) and not all(map(no_reference, held_out))
    comparer = judge if compared else None  # None: no win rate
    fresh = {"step": 0, "before": None, "seconds": 0.0}
    run, state = training.open_run(cfg, model, optimizer, fresh, may_change=MAY_CHANGE_ON_RESUME)
    started = time.perf_counter() - state["seconds"]

    def measure() -> dict[str, float]:
        sampler.reset()
        mine = len(held_out[dist.rank() :: dist.world()])
        with dist.gathered(model), run.bar(total=mine, unit="request") as bar:
            return rates(
                evaluate(rollout, held_out, comparer, seed=cfg.seed, progress=lambda _: bar.update())
            )

    if held_out and state["before"] is None:
        state["before"] = measure()
        win = f", win {state['before']['win_rate']:.3f}" if compared else ""
        run.line(f"before: valid {state['before']['valid_rate']:.3f}{win}")

    bar = run.bar(total=cfg.steps, start=state["step"])
    for step in range(state["step"] + 1, cfg.steps + 1):
        # roll out
        clock = time.perf_counter()
        sampler.reset()
        rollout.wait_s = 0.0
        chosen = pick(len(train), cfg, step)
        envs = [train[chosen[slot]].fork() for slot in slots]
        seeds = [[seed_for(cfg.seed, step, slot, member) for member in range(cfg.group)] for slot in slots]
        with dist.gathered(model):
            groups = rollout.run(envs, group=cfg.group, seeds=seeds, until=dist.got_sigterm)
        if dist.stop_requested():
            break
        episodes = [episode for group in groups for episode in group]
        times = {"sample_s": time.perf_counter() - clock, "wait_s": rollout.wait_s}

        # score
        clock, errors = time.perf_counter(), []
        keys = [f"{step}/{slots[episode.group]}/{episode.member}" for episode in episodes]
        asking = Asking(seed=cfg.seed, keys=keys, workers=max(1, cfg.workers), on_error=errors.append)
        feedback = REWARDS[cfg.reward](episodes, judge, asking)
        times["score_s"] = time.perf_counter() - clock

        # advantages
        advantages = group_advantages(feedback.rewards, group=cfg.group, scale=cfg.scale_rewards)

        # pack and update, on `updates` shares of the requests
        clock = time.perf_counter()
        lr = lr_at(
            step - 1, base=cfg.lr, total=cfg.steps, warmup=min(cfg.warmup, cfg.steps),
            floor=cfg.lr * cfg.lr_floor, schedule=cfg.schedule,
        )  # fmt: skip
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        shares, parts = [], [slots[episode.group] * cfg.updates // cfg.prompts for episode in episodes]
        for part in range(cfg.updates):  # parts by slot: the same ones with any number of ranks
            members = [i for i in range(len(episodes)) if parts[i] == part]
            trajectories = [episodes[i].trajectory for i in members]
            own = [advantages[i] for i in members]
            shares.append(update(model, optimizer, trajectories, own, cfg, reference=reference))
        times["train_s"] = time.perf_counter() - clock

        # log
        row = metrics(totals(episodes, feedback, advantages, times, cfg), shares, lr)
        run.metrics({"step": step} | row)
        run.trajectories(records(step, episodes, feedback, chat))
        run.line(headline({"step": step} | row))
        if errors:
            run.line(f"  {len(errors)} comparisons failed on rank 0, the first: {errors[0]}")
        bar.update()

        # save
        state |= {"step": step, "seconds": time.perf_counter() - started}
        if step % cfg.save_every == 0 or step == cfg.steps:
            checkpoint.save(Path(cfg.out) / "checkpoints", step, model, optimizer, state)
        if dist.stop_requested():
            break

    bar.close()
    if (step := state["step"]) < cfg.steps:
        if step % cfg.save_every:
            checkpoint.save(Path(cfg.out) / "checkpoints", step, model, optimizer, state)
        run.line(f"stopped by SIGTERM after step {step}; go on with --resume true and the same flags")
        run.close()
        return {}
    training.export(model, Path(cfg.out), folder=folder, base_name=cfg.model, adapted=bool(cfg.lora_r))
    summary = {"before": state["before"], "after": measure() if held_out else None}
    summary["seconds"] = time.perf_counter() - started
    if held_out:
        by = f", judge {judge.name}" if compared else ""
        run.line(f"{len(held_out)} held-out requests, sampled at temperature {cfg.temperature:g}{by}")
        run.line(before_after(summary["before"], summary["after"]))
    run.summary(summary)
    run.close()
    return summary


if __name__ == "__main__":
    try:
        main(config.parse(Config))
    except (ValueError, OSError, EndpointError) as error:
        raise SystemExit(f"train_grpo.py: {error}") from None
    finally:
        dist.close()
