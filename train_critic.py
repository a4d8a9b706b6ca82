"""Caddie: a critic learns to advise a frozen agent from the outcomes of the agent's episodes.

A frozen agent works on a task up to a sampled turn. The critic reads what the agent has seen and done, and
writes several critiques of it: an analysis, and advice for the next step. From that very point, world and
cache forked, the agent goes on with each of them, and whether it succeeds is the critique's reward; a
malformed critique gets -1 and no continuation. Rewards are normalised among the critiques of one point,
points at which all are equal are replaced by others, and a clipped-ratio loss moves the critic's own tokens.

    python train_critic.py                                     # built-in models and world, CPU, minutes
    python train_critic.py --model Qwen/Qwen3-4B-Instruct-2507 --agent same --lora_r 16 --data DIR ...
    torchrun --nproc_per_node 4 train_critic.py --model Qwen/Qwen3-4B-Instruct-2507 \\
        --agent Qwen/Qwen3-4B-Instruct-2507 --bench alfworld --data DIR ...                    # four GPUs
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
        train_critic.py --model Qwen/Qwen3-4B-Instruct-2507 ...                                # two nodes

Source: Training Advisors for LLM Agents from Task Outcomes (Caddie, arXiv:2610.09858); what the paper leaves
open is in docs/deviations.md. Left out: training the agent along, value models, GSPO and KL terms.
"""

import functools
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from envs import BENCHMARKS, musique_make
from nanoplan import checkpoint, config, dist, lora, training, weights
from nanoplan.advice import items_of, mean_success, report
from nanoplan.batch import pack, pad_micro_batches
from nanoplan.critic import AdaptersOff, Plan, State, advised, explore, parse_protocol, write_locally
from nanoplan.evaluate import in_order, read_lines, seed_for, write_lines
from nanoplan.llm import Endpoint, EndpointError
from nanoplan.log import before_after
from nanoplan.losses import policy_loss, token_weights
from nanoplan.model import Packed
from nanoplan.remote import RemoteRollout
from nanoplan.rollout import Budget, Rollout
from nanoplan.sampler import Sampler
from nanoplan.stats import lr_at


@dataclass(frozen=True)
class Config:
    # who learns, whom it advises, on what
    model: str = "assets/critic"  # the critic: HF folder or hub name
    agent: str = "assets/agent"  # the frozen agent: HF folder, hub name, or "same": the critic's base model
    agent_adapter: str = (
        ""  # a folder in PEFT's format that the frozen agent wears, as train_grpo.py writes it
    )
    agent_url: str = ""  # an OpenAI-compatible server in place of a local agent; --agent is its model's name
    bench: Literal["musique", "alfworld"] = "musique"
    data: str = ""  # folder of the benchmark; empty = the built-in world, made on first use
    split: str = ""  # held-out tasks; empty = dev (musique), valid_unseen (alfworld)
    top_k: int = 2  # passages of a search; musique
    retrieval: str = ""  # address of a retrieval service, in place of the attached passages; musique
    families: tuple[str, ...] = ("place", "heat", "light")  # games to train on; alfworld; Caddie
    train_actions: int = 12  # of prefix and continuation together; alfworld; Caddie
    eval_actions: int = 50  # of a held-out game; alfworld; Caddie
    out: str = "runs/train_critic"  # run folder; an earlier run there is moved aside unless resumed
    seed: int = 0  # of data order and sampling; a run is a function of its config
    resume: bool = False  # continue the run in --out from its newest checkpoint
    dry_run: bool = False  # print the critic's first prompt, memory and sampling settings, and stop
    # how much
    steps: int = 30  # rollout-and-update rounds; 0 = only measure the critic
    prompts: int = 8  # states per step over all ranks
    group: int = 8  # critiques per state, G
    continuations: int = 1  # of the agent per critique, N; Caddie compares 1 and 5
    draws: int = (
        3  # how often a state may be drawn whose critiques are all worth the same, the first included
    )
    eval_n: int = 100  # held-out tasks measured before and after; 0 = none
    eval_trials: int = 2  # episodes per held-out task; Caddie: 8
    eval_protocol: str = "window:1-1"  # none, step:K, window:LOW-HIGH, prob:CHANCE[:MOST], self[:MOST]
    save_every: int = 20  # steps between checkpoints; one is always written at the end
    # where the critic speaks
    states: Literal["window", "self"] = "window"  # after a drawn turn, or where the agent calls for it
    low: int = 1  # first turn after which it may be; Caddie: MuSiQue 1, ALFWorld 2
    high: int = 2  # last one; Caddie: 10
    step_seed: Literal["draw", "task"] = (
        "draw"  # the turn is drawn anew, or from the task's id; Caddie: ALFWorld
    )
    # what a critique is worth
    reward: Literal["outcome", "gumbel"] = "outcome"  # gumbel: minus the outcome without it, at shared noise
    baseline: Literal["group", "none"] = "group"  # none: minus the mean outcome without a critique
    baseline_n: int = 4  # continuations behind that mean, M
    overflow: Literal["drop", "fail"] = (
        "drop"  # a continuation that outgrew the context; Caddie: ALFWorld fail
    )
    # limits of the agent's episode, tokens and turns
    turns: int = 8  # model turns per episode
    turn_tokens: int = 48  # sampled tokens per turn
    observation_tokens: int = 256  # tokens of one tool result
    total_tokens: int = 1200  # all tokens of an episode
    agent_temperature: float = 1.0
    # limits of the critic
    critic_tokens: int = 64  # sampled tokens of a critique
    critic_total: int = 1200  # tokens of its prompt and critique
    style: Literal["advise", "review", "checklist"] = "advise"  # how the critic is asked
    temperature: float = 1.0  # of the critic, in sampling and in the loss
    rows: int = 0  # agent's rows decoded at once per rank; 0 = all continuations of the step
    # loss
    clip_low: float = 0.2  # lower clip of the ratio; DAPO
    clip_high: float = 0.28  # upper clip of the ratio; DAPO
    reduction: Literal["token", "sequence", "constant"] = "token"  # DAPO, GRPO, Dr. GRPO
    scale_rewards: bool = True  # divide advantages by the group's standard deviation
    # optimizer
    lr: float = 1e-3  # peak learning rate; 1e-6 for all weights of a 4B critic
    warmup: int = 3  # steps
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    lr_floor: float = 0.1  # share of lr left at the end
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 1.0  # global norm at which gradients are clipped
    micro_tokens: int = 16384  # packed tokens per forward-backward
    # model
    lora_r: int = 0  # the critic's adapter rank; 0 = all weights learn, as in Caddie
    lora_alpha: float = 32.0  # adapter scale is alpha / r
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = float32 on a CPU, bfloat16 on a GPU
    checkpointing: bool = False  # recompute activations in backward: less memory, a third more work


HELD_OUT = {"musique": "dev", "alfworld": "valid_unseen"}  # splits
MAY_CHANGE_ON_RESUME = {"resume", "dry_run", "save_every", "out", "micro_tokens"}


def check(cfg: Config, world: int) -> None:
    """Refuse settings that cannot work together. Raises ValueError with what to change."""
    if cfg.group < 2 and cfg.baseline == "group":
        raise ValueError(f"group={cfg.group}: critiques are compared with each other; use 2 or more")
    if cfg.prompts % world or cfg.prompts < 1:
        raise ValueError(f"prompts={cfg.prompts} is no multiple of the {world} processes; change --prompts")
    if cfg.bench not in BENCHMARKS or (cfg.bench != "musique" and not cfg.data):
        raise ValueError(f"bench={cfg.bench}: give its folder as --data; only musique has a built-in world")
    if cfg.steps < 0 or (not cfg.steps and not cfg.eval_n):
        raise ValueError(f"steps={cfg.steps}, eval_n={cfg.eval_n}: nothing to do; raise one of them")
    for name in ("save_every", "draws", "continuations", "baseline_n", "eval_trials"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)}: wanted 1 or more")
    if not 1 <= cfg.low <= cfg.high < cfg.turns:
        raise ValueError(f"low={cfg.low}, high={cfg.high}: wanted 1 <= low <= high < turns={cfg.turns}")
    if not cfg.temperature > 0:
        raise ValueError(f"temperature={cfg.temperature}: training samples; use a number above 0")
    if cfg.agent == "same" and not cfg.lora_r:
        raise ValueError("agent=same needs --lora_r: the agent is the critic without its adapters")
    if cfg.agent_url and (cfg.agent_adapter or cfg.reward == "gumbel"):
        raise ValueError(
            f"agent_url={cfg.agent_url}: an agent elsewhere has no adapter and no noise to share"
        )
    if cfg.agent == "same" and cfg.agent_adapter:
        raise ValueError("agent=same wears no adapter of its own; give the agent's base as --agent")
    if cfg.reward == "gumbel" and cfg.baseline == "none":
        raise ValueError("reward=gumbel already subtracts the outcome without a critique; use baseline group")
    if cfg.critic_total > cfg.micro_tokens:
        raise ValueError(f"micro_tokens={cfg.micro_tokens} cannot hold critic_total={cfg.critic_total}")
    if 0 < cfg.rows <= cfg.prompts // world and not cfg.agent_url:
        raise ValueError(f"rows={cfg.rows}: {cfg.prompts // world} states wait while others branch; use more")
    parse_protocol(cfg.eval_protocol)


def load_tasks(cfg: Config) -> tuple[list, list]:
    """Environments to train on and to hold out."""
    bench, split = BENCHMARKS[cfg.bench], cfg.split or HELD_OUT[cfg.bench]
    data = Path(cfg.data) if cfg.data else musique_make.builtin()
    if cfg.bench == "musique":
        first = last = {"top_k": cfg.top_k, "retrieval": cfg.retrieval}
    else:
        first = {"families": cfg.families, "max_actions": cfg.train_actions}
        last = {"max_actions": cfg.eval_actions}
    held_out = bench.load(split, data, n=cfg.eval_n, seed=0, **last) if cfg.eval_n else []
    return bench.load("train", data, **first) if cfg.steps or not held_out else held_out, held_out


def compute_dtype(cfg: Config) -> torch.dtype:
    """In which the models compute."""
    return weights.dtype_named(cfg.dtype, dist.device())


def load_agent(cfg: Config, critic_chat, critic_model, slots: int):
    """The frozen agent, and the model behind it (None elsewhere)."""
    budget = Budget(cfg.turns, cfg.turn_tokens, cfg.observation_tokens, cfg.total_tokens)
    if cfg.agent_url:
        endpoint = Endpoint(cfg.agent_url, cfg.agent)
        endpoint.probe()
        return RemoteRollout(endpoint, budget, temperature=cfg.agent_temperature), None
    chat, model = critic_chat, AdaptersOff(critic_model) if cfg.agent == "same" else None
    if model is None:
        chat, model = weights.load_policy(cfg.agent, dtype=compute_dtype(cfg), device=dist.device())
        if cfg.agent_adapter:
            lora.load_adapter(model, weights.fetch(cfg.agent_adapter))
        model.requires_grad_(False)
    without = {"gumbel": cfg.group * cfg.continuations, "none": cfg.baseline_n, "group": 0}
    extra = without["gumbel" if cfg.reward == "gumbel" else cfg.baseline]
    sampler = Sampler(
        model, rows=cfg.rows or slots * (1 + cfg.group * cfg.continuations + extra), max_len=cfg.total_tokens,
        temperature=cfg.agent_temperature, dtype=compute_dtype(cfg),
    )  # fmt: skip
    return Rollout(sampler, chat, budget, workers=0), model


def fingerprint(model) -> str:
    """A hash of every weight of the agent, adapters of the critic aside; "" for an agent elsewhere."""
    if model is None:
        return ""
    own, digest = isinstance(model, AdaptersOff), hashlib.blake2b(digest_size=16)
    for name, p in (model.model if own else model).named_parameters():
        if not (own and ".lora_" in name):
            digest.update(name.encode())
            digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def same_agent(state: dict, *, agent_hash: str, out: str) -> None:
    """Refuse to go on with another agent."""
    if state["agent"] != agent_hash:
        raise ValueError(f"the agent's weights are not those that {out} began with; give the same --agent")


def pick(num_tasks: int, cfg: Config, step: int, slot: int, draw: int) -> int:
    """Index of the task of a slot's n-th draw: a pure function of (seed, step, slot, draw)."""
    place = ((step - 1) * cfg.draws + draw) * cfg.prompts + slot
    epoch, index = divmod(place, num_tasks)
    return training.epoch_order(num_tasks, str(cfg.seed), epoch)[index]


def draw_states(
    agent, critic: Rollout, plan: Plan, train: list, slots, cfg: Config, step: int
) -> list[State]:
    """All states of this rank's slots: a slot is drawn again while its critiques are all worth the same, or
    its episode was over too early, at most `draws` times. No collective: ranks may draw differently often."""
    states: list[State] = []
    for draw in range(cfg.draws):
        last = {state.slot: state for state in states}
        todo = [slot for slot in slots if slot not in last or not last[slot].kept]
        if not todo or dist.got_sigterm():
            break
        tasks = [(slot, draw, train[pick(len(train), cfg, step, slot, draw)].fork()) for slot in todo]
        states += explore(agent, critic, plan, tasks, key=(cfg.seed, step), until=dist.got_sigterm)
    return states


def update(model, optimizer, trajectories, advantages, cfg: Config) -> dict[str, float]:
    """One optimizer update on this rank's critiques; what is returned is summed over all of them."""
    device = dist.device()
    batches = pack(trajectories, advantages, max_tokens=cfg.micro_tokens, device=device)
    own = {"tokens": sum(len(b.rows) for b in batches), "sequences": sum(len(b.index) for b in batches)}
    counts = dist.sum_over_ranks(own)
    batches = pad_micro_batches(batches, dist.max_over_ranks(max(1, len(batches))), device=device)
    total: dict[str, float] = {}
    for i, batch in enumerate(batches):
        attend = Packed(batch.cu_seqlens, batch.max_len)
        logp, entropy = model(
            batch.ids, batch.positions, attend, batch.targets, rows=batch.rows, temperature=cfg.temperature
        )
        share = token_weights(
            batch, reduction=cfg.reduction, num_tokens=int(counts["tokens"]),
            num_sequences=int(counts["sequences"]), max_tokens_per_sequence=cfg.critic_tokens,
        )  # fmt: skip
        loss, sums = policy_loss(logp, batch, weights=share, clip_low=cfg.clip_low, clip_high=cfg.clip_high)
        dist.backward(loss, model, last=i == len(batches) - 1)
        gap = (logp.detach() - batch.old_logp).abs()
        sums |= {"loss": loss.detach(), "entropy": entropy.detach().sum(), "gap": gap.sum()}
        sums["gap_max"] = gap.max() if len(gap) else gap.sum()
        for name, value in sums.items():
            value = float(value)
            more = max if name in ("ratio_max", "gap_max") else float.__add__
            total[name] = more(total[name], value) if name in total else value
    dist.sync_grads(model)
    out = dist.sum_over_ranks(total, maxes=("ratio_max", "gap_max")) | counts
    return out | training.take_step(model, optimizer, max_norm=cfg.max_grad_norm, wanted=counts["tokens"] > 0)


def metrics(states: list[State], agent, critic: Rollout, share: dict, times: dict, lr: float, cfg: Config):
    """One line of metrics.jsonl: counts over all states of all ranks, replaced ones included.

    success     share of the continuations with a critique that succeeded; reward_mean: of all critiques
    *_computed  tokens that went through the model, *_reused: that forks took from a cache instead
    """
    live = [state for state in states if state.live]
    last = {state.slot: state for state in states}
    rewards = [reward for state in live for reward in state.rewards if reward is not None]
    ends = [episode for state in live for row in state.branches for episode in row]
    known = [o for state in live for row in state.outcomes for o in row if o is not None]
    own = {
        "states": len(states), "live": len(live), "kept": sum(state.kept for state in last.values()),
        "constant": sum(not state.kept for state in live), "rewarded": len(rewards),
        "reward_sum": sum(rewards), "critiques": sum(len(state.critiques) for state in live),
        "malformed": sum(bool(c.faults) for state in live for c in state.critiques),
        "ends": len(ends), "known": len(known), "won": sum(known),
        "context": sum(e.trajectory.stop == "tokens" for e in ends),
        "errors": sum(e.trajectory.broken for e in [*ends, *(state.episode for state in states)]),
        "agent_computed": agent.computed, "agent_reused": agent.reused,
        "critic_computed": critic.computed, "critic_reused": critic.reused,
    }  # fmt: skip
    t = dist.sum_over_ranks(own | times, maxes=tuple(times))
    tokens = max(1.0, share["tokens"])
    return {
        "loss": share["loss"], "reward_mean": t["reward_sum"] / max(1, t["rewarded"]),
        "success": t["won"] / max(1, t["known"]), "malformed": t["malformed"] / max(1, t["critiques"]),
        "states": t["states"], "kept": t["kept"], "constant_groups": t["constant"] / max(1, t["live"]),
        "ended_early": (t["states"] - t["live"]) / max(1, t["states"]), "continuations": t["ends"],
        "context_overflows": t["context"], "env_errors": t["errors"], "tokens_trained": share["tokens"],
        **{name: t[name] for name in own if name.endswith(("_computed", "_reused"))},
        **{name: share[name] / tokens for name in ("clip_low", "clip_high", "entropy", "kl_old")},
        "ratio_max": share["ratio_max"], "logp_gap_mean": share["gap"] / tokens,
        "logp_gap_max": share["gap_max"], "grad_norm": share["grad_norm"], "skipped": share["skipped"],
        "lr": lr, "peak_gb": training.peak_gb(), **{name: t[name] for name in times},
    }  # fmt: skip


def records(step: int, states: list[State], chat) -> list[dict]:
    """Lines of trajectories.jsonl, over all ranks: every critique, with ids and mask, and what came of it."""
    rows = []
    for state in states:
        head = {"step": step, "id": state.id, "slot": state.slot, "draw": state.draw, "turn": state.turn}
        if not state.live:
            rows.append(head | {"stop": state.episode.trajectory.stop, "reward": None})
            continue
        for i, (review, critique) in enumerate(zip(state.reviews, state.critiques, strict=True)):
            row = {"member": i, "reward": state.rewards[i], "advantage": state.advantages[i]}
            row |= {"faults": critique.faults, "stop": review.trajectory.stop}
            row["outcomes"] = state.outcomes[i]
            row["stops"] = [episode.trajectory.stop for episode in state.branches[i]]
            row |= {"text": critique.text, "ids": review.trajectory.ids}
            rows.append(head | row | {"sampled": [int(s) for s in review.trajectory.sampled]})
    return dist.gather_objects(rows)


def measure(agent, write, envs: list, protocol: str, cfg: Config) -> list[dict]:
    """Items of `eval_trials` episodes of every held-out task, shared over the ranks, on all of them. Seeds
    are those of the task and the trial: the same with and without a critic, before and after."""
    trials = [(env.fork(), trial) for env in envs for trial in range(cfg.eval_trials)]
    mine = trials[dist.rank() :: dist.world()]
    seeds = [seed_for(cfg.seed, "eval", env.task.id, trial) for env, trial in mine]
    worlds = [env for env, _ in mine]
    episodes, notes = advised(agent, write, worlds, parse_protocol(protocol), seeds=seeds, style=cfg.style)
    return in_order(items_of(episodes, notes, trials=[trial for _, trial in mine]), total=len(trials))


def headline(row: dict) -> str:
    """The line of a step."""
    return (
        f"step {row['step']:4d}  reward {row['reward_mean']:+.3f}  success {row['success']:.3f}  "
        f"malformed {row['malformed']:.3f}  kept {row['kept']:.0f}/{row['states']:.0f}  "
        f"loss {row['loss']:+.4f}  gap {row['logp_gap_max']:.1e}  grad {row['grad_norm']:.2f}  "
        f"{row['sample_s']:.1f}+{row['train_s']:.1f} s"
    )


def dry_run(cfg: Config, agent, agent_model, critic: Rollout, model, train: list) -> None:
    """Print what a run would do first: the critic's prompt, memory, sampling settings."""
    state = explore(agent, critic, plan_of(cfg), [(0, 0, train[0].fork())], key=(cfg.seed, 1))[0]
    print(f"--- {state.id}: the agent {'pauses' if state.live else 'is over'} after turn {state.turn}")
    for review in state.reviews[:1]:
        print(review.trajectory.show(critic.chat))
        print(f"reward {state.rewards[0]}, faults {state.critiques[0].faults}")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gb = {
        "critic": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9,
        "gradients and AdamW": 12 * trained / 1e9 / (1 if cfg.lora_r else dist.world()),
        "critic's KV cache": critic.sampler.cache_gb,
    }
    if agent_model is not None:
        size = sum(p.numel() * p.element_size() for p in agent_model.parameters()) / 1e9
        gb |= {"agent": 0.0 if cfg.agent == "same" else size, "agent's KV cache": agent.sampler.cache_gb}
    print("--- memory per rank, GB, activations apart")
    print("\n".join(f"{name:22} {value:8.3f}" for name, value in gb.items()))
    print(f"--- sampling: critic at {cfg.temperature}, agent at {cfg.agent_temperature}; no filters")


def plan_of(cfg: Config) -> Plan:
    """How states are explored, by the flags."""
    return Plan(
        group=cfg.group, continuations=cfg.continuations, low=cfg.low, high=cfg.high, states=cfg.states,
        step_seed=cfg.step_seed, reward=cfg.reward, baseline=cfg.baseline, baseline_n=cfg.baseline_n,
        scale=cfg.scale_rewards, overflow=cfg.overflow, style=cfg.style,
    )  # fmt: skip


def main(cfg: Config) -> dict:
    """Train, and return what summary.json holds."""
    dist.init(cfg.seed)
    check(cfg, dist.world())
    dist.catch_sigterm()
    train, held_out = load_tasks(cfg)
    chat, model = training.load_trained(
        cfg.model, dtype=compute_dtype(cfg), checkpointing=cfg.checkpointing, lora_r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha, seed=cfg.seed,
    )  # fmt: skip
    slots = range(dist.rank(), cfg.prompts, dist.world())  # of a step's states, those of this rank
    agent, agent_model = load_agent(cfg, chat, model, len(slots))
    sampler = Sampler(
        model, rows=len(slots) * cfg.group, max_len=cfg.critic_total, temperature=cfg.temperature,
        dtype=compute_dtype(cfg),
    )  # fmt: skip
    critic = Rollout(sampler, chat, Budget(1, cfg.critic_tokens, 1, cfg.critic_total), workers=0)
    if cfg.dry_run:
        if dist.is_main():
            dry_run(cfg, agent, agent_model, critic, model, train)
        return {}
    plan, agent_hash = plan_of(cfg), fingerprint(agent_model)
    optimizer = training.adamw(model, lr=cfg.lr, weight_decay=cfg.weight_decay)
    fresh = {"step": 0, "before": None, "seconds": 0.0, "agent": agent_hash}
    run, state = training.open_run(
        cfg, model, optimizer, fresh, may_change=MAY_CHANGE_ON_RESUME,
        check=functools.partial(same_agent, agent_hash=agent_hash, out=cfg.out),
    )  # fmt: skip
    started = time.perf_counter() - state["seconds"]

    def success(who: str, protocol: str) -> float:
        sampler.reset()
        with dist.gathered(model):
            items = measure(agent, functools.partial(write_locally, critic), held_out, protocol, cfg)
        if dist.is_main():
            write_lines(Path(cfg.out) / f"items_{who}.jsonl", items)
            first = Path(cfg.out) / "items_no_critic.jsonl"
            alone = [item for _, item in read_lines(first)] if first.is_file() else None
            run.line(f"{who}: {protocol}\n{report(items, alone=alone)}")
        return mean_success(items)

    if held_out and state["before"] is None:
        alone, untrained = success("no_critic", "none"), success("untrained", cfg.eval_protocol)
        state["before"] = {"success": untrained, "success_no_critic": alone, "success_untrained": untrained}

    bar = run.bar(total=cfg.steps, start=state["step"])
    for step in range(state["step"] + 1, cfg.steps + 1):
        # roll out: prefixes, critiques, continuations, rewards; again where all critiques are worth the same
        clock = time.perf_counter()
        sampler.reset()
        agent.computed = agent.reused = critic.computed = critic.reused = 0
        with dist.gathered(model):
            states = draw_states(agent, critic, plan, train, slots, cfg, step)
        if dist.stop_requested():
            break
        times = {"sample_s": time.perf_counter() - clock}

        # pack and update, on the critiques of the states that were kept
        clock = time.perf_counter()
        lr = lr_at(
            step - 1, base=cfg.lr, total=cfg.steps, warmup=min(cfg.warmup, cfg.steps),
            floor=cfg.lr * cfg.lr_floor, schedule=cfg.schedule,
        )  # fmt: skip
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        kept = [state for state in states if state.kept]
        trajectories = [review.trajectory for state in kept for review in state.reviews]
        share = update(model, optimizer, trajectories, [a for s in kept for a in s.advantages], cfg)
        times["train_s"] = time.perf_counter() - clock

        # log
        row = metrics(states, agent, critic, share, times, lr, cfg)
        run.metrics({"step": step} | row)
        run.trajectories(records(step, states, chat))
        run.line(headline({"step": step} | row))
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
    assert fingerprint(agent_model) == agent_hash, "the frozen agent's weights have changed"
    summary = {"before": state["before"], "after": None}
    if cfg.steps:
        training.export(
            model, Path(cfg.out), folder=chat.folder, base_name=cfg.model, adapted=bool(cfg.lora_r)
        )
    if held_out and cfg.steps:
        summary["after"] = {**state["before"], "success": success("trained", cfg.eval_protocol)}
        how = f"{cfg.eval_trials} trials, critic {cfg.eval_protocol}"
        kept = f"bit for bit as it was, {agent_hash}" if agent_hash else f"elsewhere, {cfg.agent_url}"
        run.line(f"{len(held_out)} held-out tasks, {how}; the agent is {kept}")
        run.line(before_after(summary["before"], summary["after"]))
    summary["seconds"] = time.perf_counter() - started
    run.summary(summary)
    run.close()
    return summary


if __name__ == "__main__":
    try:
        main(config.parse(Config))
    except (ValueError, OSError, EndpointError) as error:
        raise SystemExit(f"train_critic.py: {error}") from None
    finally:
        dist.close()
