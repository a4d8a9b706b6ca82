"""CM-DPO: a planner learns from pairs of a flawed plan and its smallest correction.

Two stages. `sft` imitates corrected plans, some after the reasoning that leads to them. `pref` starts from
there and moves the corrected plan of each pair above the flawed one, by a margin that grows with how badly
the flawed one breaks its constraints; a soft term beside it counts preferences. Without flags both run in a
row on the built-in world, with pairs made by an exact teacher (nanoplan.synth).

    python train_cmdpo.py                                            # built-in model and world, CPU, minutes
    python train_cmdpo.py --stage sft --data pairs.jsonl --model NAME --lora_r 16 ...          # one GPU
    torchrun --nproc_per_node 4 train_cmdpo.py --stage pref --data pairs.jsonl --model runs/sft/model ...
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
        train_cmdpo.py --stage pref ...                                                        # two nodes

What --data may hold is in nanoplan/pairs.py: synth's records, plain pairs, conversations, trajectories.
Source: CM-DPO (arXiv:2610.09219) and the papers of its baselines (nanoplan/preference.py); what the paper
leaves open is in docs/deviations.md. Left out: a learned classifier for MMPO, hyperparameter searches.
"""

import functools
import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from envs import synplan
from nanoplan import checkpoint, config, dist, pairs, preference, reference, synth, training, weights
from nanoplan.batch import Batch, pack, pack_pairs, pad_micro_batches
from nanoplan.evaluate import in_order, seed_for, write_lines
from nanoplan.log import RunLog, before_after, table
from nanoplan.rollout import Budget, Rollout
from nanoplan.sampler import Sampler
from nanoplan.stats import lr_at


@dataclass(frozen=True)
class Config:
    # what is trained, on what
    stage: Literal["both", "sft", "pref"] = "both"  # both: sft, then pref on what it made
    model: str = "assets/tiny_synplan"  # HF folder or hub name
    adapter: str = ""  # LoRA adapter in PEFT's format to go on with, as after --stage sft with --lora_r
    data: str = ""  # JSONL file, see nanoplan/pairs.py; empty = synthesised for the built-in world
    out: str = "runs/train_cmdpo"  # run folder; an earlier run there is moved aside unless resumed
    seed: int = 0  # of data order, synthesis and random margins; a run is a function of its config
    resume: bool = False  # continue the run in --out from its newest checkpoint
    dry_run: bool = False  # print a pair, its margin, and memory, and stop
    # the built-in world, where --data is empty
    num_pairs: int = 2000  # verified pairs
    rewrite: bool = False  # chosen plans are written anew instead of edited as little as possible
    # how much
    sft_epochs: int = 3  # passes over the demonstrations; CM-DPO
    epochs: int = 1  # passes over the pairs; CM-DPO
    sft_batch: int = 32  # demonstrations per update over all ranks; CM-DPO
    batch: int = 32  # pairs per update over all ranks; CM-DPO
    eval_n: int = 256  # held-out instances of the built-in world planned before and after; 0 = none
    split: str = "tiny/test"  # of the built-in world, that these are of; see envs/synplan.py
    temperature: float = 0.0  # of these plans; 0 = greedy, CM-DPO
    rows: int = 128  # plans decoded at once per rank
    save_every: int = 50  # updates between checkpoints; one is always written at the end of a stage
    # sequences, tokens
    max_tokens: int = 400  # prompt and completion
    truncate: bool = False  # cut longer completions off instead of refusing the pair
    rationale: Literal["asked", "always", "never"] = "asked"  # demonstrations with reasoning, see pairs.py
    # loss
    loss: Literal[
        "cmdpo",
        "dpo",
        "ipo",
        "ipo_normalised",
        "kto",
        "simpo",
        "dpop",
        "mmpo",
        "alpha_dpo",
        "modpo",
        "cdpo_constrained",
    ] = "cmdpo"  # preference.py has the equations
    beta: float = 1.0  # scale of log-ratios; CM-DPO 0.1 on 8B
    gamma: float = 1.5  # weight of the margin; CM-DPO
    alpha: float = 0.3  # weight of the soft term; CM-DPO
    margin: Literal[pairs.MARGINS] = "normalised"  # where the margin comes from, see pairs.margins
    margin_scale: float = 0.01  # lambda inside tanh; CM-DPO
    reward_model: str = ""  # --margin reward_model: HF folder of a policy, whose log-ratios to --model reward
    reward_beta: float = 0.1  # scale of these log-ratios
    reference: str = ""  # reference.json of an earlier run on the same model and pairs, to score it once only
    ipo_tau: float = 0.1  # IPO; CM-DPO's search
    kto_chosen: float = 1.0  # KTO's weight of desirable examples; CM-DPO's search
    kto_rejected: float = 1.0  # KTO's weight of undesirable examples; CM-DPO's search
    simpo_beta: float = 2.0  # SimPO and alpha-DPO; CM-DPO's search
    simpo_gamma: float = 1.4  # SimPO and alpha-DPO: margin, not divided by beta; CM-DPO's search
    dpop_penalty: float = 50.0  # DPOP; CM-DPO's search
    mmpo_gamma: float = 2.2  # MMPO: how sure a margin of 1 makes
    alpha_dpo_alpha: float = 0.5  # alpha-DPO; CM-DPO's search
    modpo_weight: float = 0.8  # MODPO: of the order of the pairs; the rest is of soft preferences
    dual_start: float = 1.0  # C-DPO: multiplier at the start
    dual_lr: float = 1e-3  # C-DPO; CM-DPO's search
    dual_limit: float = 0.0  # C-DPO: mean normalised severity that is allowed
    dual_every: int = 10  # C-DPO: updates between fresh samples
    dual_n: int = 32  # C-DPO: plans in a fresh sample
    dual_split: str = "tiny/val"  # C-DPO: instances that they are for
    # optimizer
    sft_lr: float = 2e-3  # peak learning rate; CM-DPO 2e-5 on 8B
    lr: float = 2e-4  # peak learning rate; CM-DPO 5e-7 on 8B
    warmup: float = 0.1  # share of a stage's updates
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    lr_floor: float = 0.1  # share of lr left at the end
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 1.0  # global norm at which gradients are clipped
    micro_tokens: int = 16384  # packed tokens per forward-backward
    # model
    lora_r: int = 0  # adapter rank; 0 = full fine-tuning
    lora_alpha: float = 32.0  # adapter scale is alpha / r
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = float32 on a CPU, bfloat16 on a GPU
    checkpointing: bool = False  # recompute activations in backward: less memory, a third more work


CACHE = Path(__file__).parent / ".cache"
MAY_CHANGE_ON_RESUME = {"resume", "dry_run", "save_every", "out"}
NEEDS_MARGIN = ("cmdpo", "mmpo")


@dataclass(slots=True)
class Stage:
    """Updates of one kind: each takes the next `batch` items of a shuffled pass over all of them."""

    name: str  # sft | pref
    num_items: int  # demonstrations or pairs
    epochs: int
    batch: int
    lr: float
    first: int  # updates of the stages before

    @property
    def steps(self) -> int:
        return math.ceil(self.num_items * self.epochs / self.batch)

    @property
    def last(self) -> int:
        """The update that ends the stage, counted from the start of the run."""
        return self.first + self.steps

    def lr_of(self, step: int, cfg: Config) -> float:
        return lr_at(
            step - self.first - 1, base=self.lr, total=self.steps, warmup=int(cfg.warmup * self.steps),
            floor=self.lr * cfg.lr_floor, schedule=cfg.schedule,
        )  # fmt: skip

    def pick(self, step: int, seed: int) -> list[int]:
        """Indices of the items of an update: a pure function of (seed, step), each item once per pass."""
        at = (step - self.first - 1) * self.batch
        places = range(at, min(at + self.batch, self.num_items * self.epochs))
        places = (divmod(place, self.num_items) for place in places)
        return [self.order(seed, epoch)[index] for epoch, index in places]

    def order(self, seed: int, epoch: int) -> list[int]:
        return training.epoch_order(self.num_items, f"{seed}/{self.name}", epoch)

    def one_pass(self, seed: int) -> list[list[int]]:
        """The items of the updates of the first pass; its last one ends with the pass."""
        order = self.order(seed, 0)
        return [order[at : at + self.batch] for at in range(0, self.num_items, self.batch)]


@dataclass(slots=True)
class Known:
    """What the preference stage knows of its pairs before it starts; tensors are (P,) fp32 on the device."""

    ref_chosen: Tensor  # nats
    ref_rejected: Tensor  # nats
    margin: Tensor  # m in [0, 1]
    soft_gap: Tensor  # preference score of chosen minus rejected
    cost: Tensor  # normalised severity of the rejected plan; the chosen one's is 0
    mismatched: list  # for KTO: a trajectory per pair, else empty
    ref_mismatched: list[float]  # nats; empty unless mismatched


def check(cfg: Config, world: int) -> None:
    """Refuse settings that cannot work together. Raises ValueError with what to change."""
    for name in ("sft_epochs", "epochs", "sft_batch", "batch", "save_every", "num_pairs", "dual_every"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)}: wanted 1 or more")
    if not 0 <= cfg.warmup <= 1:
        raise ValueError(f"warmup={cfg.warmup}: a share of a stage's updates, wanted 0 to 1")
    if 2 * cfg.max_tokens > cfg.micro_tokens:
        raise ValueError(f"micro_tokens={cfg.micro_tokens} cannot hold two of max_tokens={cfg.max_tokens}")
    if (cfg.margin == "reward_model") != bool(cfg.reward_model):
        raise ValueError(
            f"margin={cfg.margin}, reward_model={cfg.reward_model!r}: give both of --margin reward_model and "
            "--reward_model FOLDER, or neither"
        )
    if not 0 < cfg.modpo_weight <= 1:
        raise ValueError(f"modpo_weight={cfg.modpo_weight}: wanted above 0, at most 1")
    if cfg.stage == "both" and cfg.reference:
        raise ValueError("reference: --stage both makes its own policy to refer to; use --stage pref")


def compute_dtype(cfg: Config) -> torch.dtype:
    """In which the model computes."""
    return weights.dtype_named(cfg.dtype, dist.device())


def load_model(cfg: Config):
    """The policy on this rank, and its chat."""
    chat, model = training.load_trained(
        cfg.model, dtype=compute_dtype(cfg), checkpointing=cfg.checkpointing, lora_r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha, seed=cfg.seed, adapter=cfg.adapter,
    )  # fmt: skip
    if cfg.max_tokens > model.config.max_positions:
        most = model.config.max_positions
        raise ValueError(f"max_tokens={cfg.max_tokens}: the model has {most} positions; lower it")
    return chat, model


def player_of(cfg: Config, chat, model) -> Rollout:
    """What plans held-out instances: one turn, the plan."""
    sampler = Sampler(
        model, rows=cfg.rows, max_len=cfg.max_tokens, temperature=cfg.temperature, training=False,
        dtype=compute_dtype(cfg),
    )  # fmt: skip
    return Rollout(sampler, chat, Budget(1, cfg.max_tokens, 1, cfg.max_tokens), workers=0)


def plan_each(player: Rollout, envs: list, *, seed: int, progress=None) -> list:
    """One plan for each of this rank's share of the instances."""
    mine = share_of(envs)
    seeds = [[seed_for(seed, "eval", env.task.id)] for env in mine]
    return [group[0] for group in player.run(mine, group=1, seeds=seeds, on_done=progress)]


def plan_of(episode) -> dict:
    """What the rates need to know of a plan."""
    verdict, soft = episode.env.verify(), episode.env.measures()["soft"]
    tokens = episode.trajectory.num_sampled
    return {"passed": verdict.passed, "checks": verdict.checks, "soft": soft, "tokens": tokens}


def margins_of(cfg: Config, model, items: list[pairs.Pair], batches) -> Tensor:
    """m of each pair; 0 for losses without a margin."""
    if cfg.loss not in NEEDS_MARGIN:
        return torch.zeros(len(items))
    rewards = None
    if cfg.margin == "reward_model":
        rewards = rewards_of(cfg, model, items, batches)
    return pairs.margins(items, source=cfg.margin, scale=cfg.margin_scale, seed=cfg.seed, rewards=rewards)


def rewards_of(cfg: Config, model, items: list[pairs.Pair], batches) -> list[float]:
    """r(w) - r(l) under DPO's implicit reward of --reward_model: beta times its log-ratio to this policy."""
    device, dtype = dist.device(), compute_dtype(cfg)
    judge = weights.load_model(
        weights.fetch(cfg.reward_model), dtype=dtype, device=device, num_ids=model.num_ids
    )
    own, theirs = (
        reference.score_pairs(m, items, batches, max_tokens=cfg.micro_tokens) for m in (model, judge)
    )
    gains = [[a - b for a, b in zip(theirs[side], own[side], strict=True)] for side in (0, 1)]
    return [cfg.reward_beta * (w - l) for w, l in zip(*gains, strict=True)]


def reference_of(cfg: Config, model, items: list[pairs.Pair], batches, state: dict) -> reference.Reference:
    """The stored scores of the policy that the stage starts from; scored where there are none yet."""
    data, own = pairs.fingerprint(items), Path(cfg.out) / "reference.json"
    key = state["reference"] or reference.fingerprint(model)  # on resume the weights have moved
    state["reference"] = key
    path = Path(cfg.reference) if cfg.reference else own
    if cfg.reference or (cfg.resume and own.exists()):
        stored = reference.load(path, model=key, data=data)
        if cfg.loss == "kto" and not stored.mismatched:
            raise ValueError(f"{path} was scored for another loss than kto; leave --reference out")
        return stored
    if state["stage"] == "pref":
        raise ValueError(f"{own} is gone, and the weights that made it have moved; start the stage again")
    chosen, rejected = reference.score_pairs(model, items, batches, max_tokens=cfg.micro_tokens)
    mismatched = []
    if cfg.loss == "kto":
        mixed = pairs.mismatches(items)
        mismatched = reference.score_each(model, mixed, batches, max_tokens=cfg.micro_tokens)
    made = reference.Reference(key, data, chosen, rejected, mismatched)
    made.save(own)
    return made


def prepare(cfg: Config, model, items: list[pairs.Pair], stage: Stage, state: dict, run: RunLog) -> Known:
    """Score the reference, draw up the margins and print their distribution."""
    batches = [share_of(chosen) for chosen in stage.one_pass(cfg.seed)]
    ref = reference_of(cfg, model, items, batches, state)
    margin = margins_of(cfg, model, items, batches)
    if cfg.loss in NEEDS_MARGIN:
        run.line(f"margin of {len(items)} pairs, from {cfg.margin}, gamma {cfg.gamma:g}")
        rows = {"m": margin.tolist(), "gamma m": (cfg.gamma * margin).tolist()}
        told = {name: pairs.distribution(values) for name, values in rows.items()}
        head = ["", *next(iter(told.values()))]
        run.line(table(head, [[name, *(f"{v:.4f}" for v in row.values())] for name, row in told.items()]))
    costs = [0.0 if pair.severity is None else pair.severity["normalised"] for pair in items]
    columns = (ref.chosen, ref.rejected, margin.tolist(), [pair.soft_gap for pair in items], costs)
    tensors = [torch.tensor(column, dtype=torch.float32, device=dist.device()) for column in columns]
    mismatched = pairs.mismatches(items) if cfg.loss == "kto" else []
    return Known(*tensors, mismatched, ref.mismatched)


def share_of(chosen: list) -> list:
    """This rank's part of what all ranks do together."""
    return chosen[dist.rank() :: dist.world()]


def losses_of(cfg: Config, logps: preference.PairLogps, known: Known, at: list[int], facts: dict) -> Tensor:
    """One loss per pair, (P,), by the name of --loss."""
    p, beta = preference, cfg.beta
    soft_gap, cost = known.soft_gap[at], known.cost[at]
    simpo = {"beta": cfg.simpo_beta, "gamma": cfg.simpo_gamma}
    table = {
        "cmdpo": lambda: p.cmdpo(
            logps, margin=known.margin[at], soft_gap=soft_gap, feasible=torch.ones_like(cost), beta=beta,
            gamma=cfg.gamma, alpha=cfg.alpha,
        ),
        "dpo": lambda: p.dpo(logps, beta=beta),
        "ipo": lambda: p.ipo(logps, tau=cfg.ipo_tau),
        "ipo_normalised": lambda: p.ipo_normalised(logps, tau=cfg.ipo_tau),
        "kto": lambda: p.kto(
            logps, beta=beta, z0=facts["z0"], weight_chosen=cfg.kto_chosen, weight_rejected=cfg.kto_rejected
        ),
        "simpo": lambda: p.simpo(logps, **simpo),
        "dpop": lambda: p.dpop(logps, beta=beta, penalty=cfg.dpop_penalty),
        "mmpo": lambda: p.mmpo(logps, beta=beta, gap=known.margin[at], gamma=cfg.mmpo_gamma),
        "alpha_dpo": lambda: p.alpha_dpo(
            logps, **simpo, alpha=cfg.alpha_dpo_alpha, mean=facts["gap_mean"], std=facts["gap_std"]
        ),
        "modpo": lambda: p.modpo(logps, beta=beta, weight=cfg.modpo_weight, other_gap=soft_gap),
        "cdpo_constrained": lambda: p.cdpo_constrained(
            logps, beta=beta, label=p.relabel(soft_gap, -cost, multiplier=facts["multiplier"])
        ),
    }  # fmt: skip
    return table[cfg.loss]()


def logps_of(sums: Tensor, batch: Batch, known: Known, at: list[int]) -> preference.PairLogps:
    """sums (2P,) of a batch of pairs, chosen and rejected in turn; at: which pairs these are."""
    lengths = batch.lengths[: len(sums)]
    return preference.PairLogps(
        sums[::2], sums[1::2], known.ref_chosen[at], known.ref_rejected[at], lengths[::2], lengths[1::2]
    )


def pref_share(model, batch: Batch, mine: list[int], known: Known, facts: dict, num_pairs: int, cfg: Config):
    """This rank's share of the step's preference loss in one micro-batch, and sums over its pairs."""
    at = [mine[index // 2] for index in batch.index[::2]]
    logps = logps_of(reference.sequence_sums(reference.forward(model, batch), batch), batch, known, at)
    losses = losses_of(cfg, logps, known, at, facts)
    gains = (logps.gain_chosen.detach(), logps.gain_rejected.detach())
    sums = {
        "loss": losses.detach().double().sum(), "pairs": len(at), "tokens": len(batch.rows),
        "accuracy": (gains[0] > gains[1]).sum(), "reward_chosen": cfg.beta * gains[0].sum(),
        "reward_rejected": cfg.beta * gains[1].sum(), "logp_chosen": logps.chosen.detach().sum(),
        "logp_rejected": logps.rejected.detach().sum(), "margin": known.margin[at].sum(),
    }  # fmt: skip
    return losses.sum() / num_pairs, sums


def sft_share(model, batch: Batch, num_tokens: int):
    """This rank's share of the step's mean negative log-likelihood in one micro-batch, and its sums."""
    logp = reference.forward(model, batch)
    return -logp.sum() / num_tokens, {"loss": -logp.detach().double().sum(), "tokens": len(batch.rows)}


def update(model, optimizer, batches: list[Batch], share, cfg: Config) -> dict[str, float]:
    """One optimizer update; share(batch) gives a micro-batch's loss and sums, which come back added up."""
    device = dist.device()
    batches = pad_micro_batches(batches, dist.max_over_ranks(max(1, len(batches))), device=device)
    parts = []
    for i, batch in enumerate(batches):
        loss, sums = share(batch)
        dist.backward(loss, model, last=i == len(batches) - 1)
        parts.append(sums)
    dist.sync_grads(model)
    out = dist.sum_over_ranks({name: sum(float(part[name]) for part in parts) for name in parts[0]})
    return out | training.take_step(model, optimizer, max_norm=cfg.max_grad_norm)


def ascend(cfg: Config, model, player: Rollout, step: int, multiplier: float) -> float:
    """C-DPO's multiplier after a fresh sample: plans of the policy for instances it is not measured on."""
    envs = synplan.load(cfg.dual_split, None, n=cfg.dual_n, seed=seed_for(cfg.seed, "dual", step))
    player.sampler.reset()
    with dist.gathered(model):
        episodes = plan_each(player, envs, seed=seed_for(cfg.seed, step))
    costs = dist.gather_objects([episode.env.measures()["severity"] for episode in episodes])
    mean = sum(costs) / len(costs)
    return preference.dual_step(multiplier, mean_cost=mean, limit=cfg.dual_limit, lr=cfg.dual_lr)


def facts_of(cfg: Config, model, batches, mine: list[int], known: Known, state: dict) -> dict[str, float]:
    """What the loss needs of the whole step before its first backward."""
    if cfg.loss == "kto":
        own = [known.mismatched[i] for i in mine]
        mixed = pack(own, [1.0] * len(own), max_tokens=cfg.micro_tokens, device=dist.device())
        found = reference.score_batches(model, mixed)
        gains = {"sum": sum(v - known.ref_mismatched[mine[i]] for i, v in found.items()), "count": len(found)}
        total = dist.sum_over_ranks(gains)
        return {"z0": preference.kto_z0(total["sum"], total["count"])}
    if cfg.loss == "alpha_dpo":
        found = reference.score_batches(model, batches)
        gaps = []
        for batch in batches:
            sums = torch.tensor([found[index] for index in batch.index], device=dist.device())
            at = [mine[index // 2] for index in batch.index[::2]]
            gaps += preference.alpha_gap(logps_of(sums, batch, known, at)).tolist()
        every = dist.gather_objects(gaps)
        mean = math.fsum(every) / len(every)
        std = math.sqrt(math.fsum((gap - mean) ** 2 for gap in every) / len(every))
        state["moments"] = preference.running_moments(state["moments"], mean, std)
        return {"gap_mean": state["moments"][0], "gap_std": state["moments"][1]}
    return {"multiplier": state["multiplier"]} if cfg.loss == "cdpo_constrained" else {}


def row_of(sums: dict[str, float], lr: float, seconds: float) -> dict[str, float]:
    """One line of metrics.jsonl: means over the pairs of the step, or the tokens of a warm-start's.

    reward_chosen, reward_rejected  beta * h, nats times beta; reward_margin their difference
    accuracy                        share of pairs with h_w > h_l: 0 before the first update
    logp_chosen, logp_rejected      nats per completion
    """
    names = [name for name in sums if name not in ("pairs", "tokens", "grad_norm", "skipped")]
    count = max(1.0, sums.get("pairs", sums["tokens"]))
    row = {name: sums[name] / count for name in names}
    if "pairs" in sums:
        row |= {"reward_margin": row["reward_chosen"] - row["reward_rejected"], "pairs": sums["pairs"]}
    row |= {name: sums[name] for name in ("tokens", "grad_norm", "skipped")}
    return row | {"lr": lr, "seconds": seconds, "peak_gb": training.peak_gb()}


def headline(row: dict) -> str:
    """The line of a step."""
    text = f"{row['stage']:4} {row['step']:5d}  loss {row['loss']:.4f}"
    if row["stage"] == "pref":
        text += f"  accuracy {row['accuracy']:.3f}  reward margin {row['reward_margin']:+.4f}"
        text += f"  logp {row['logp_chosen']:.2f} / {row['logp_rejected']:.2f}"
    return text + f"  grad {row['grad_norm']:.2f}  {row['seconds']:.1f} s"


def rates_of(plans: list[dict]) -> dict[str, float]:
    """PR, DR, the preference score over plans that pass, and each check over plans that decode."""
    passed = [plan["soft"] for plan in plans if plan["passed"]]
    rates = {"pass_rate": len(passed) / len(plans), "decode_rate": 0.0}
    rates["soft_score"] = sum(passed) / max(1, len(passed))
    for name in dict.fromkeys(name for plan in plans for name in plan["checks"]):
        known = [plan["checks"][name] for plan in plans if name in plan["checks"]]
        rates[f"{name}_rate"] = sum(known) / len(known)
    return rates | {"tokens_per_plan": sum(plan["tokens"] for plan in plans) / len(plans)}


def stages_of(cfg: Config, num_demonstrations: int, num_pairs: int) -> list[Stage]:
    sft = Stage("sft", num_demonstrations, cfg.sft_epochs, cfg.sft_batch, cfg.sft_lr, 0)
    first = sft.steps if cfg.stage == "both" else 0
    pref = Stage("pref", num_pairs, cfg.epochs, cfg.batch, cfg.lr, first)
    return {"both": [sft, pref], "sft": [sft], "pref": [pref]}[cfg.stage]


def builtin_pairs(cfg: Config) -> Path:
    """The built-in world's pairs by scripts and exact search, made on first use; a file per kind and seed."""
    kind = "rewrite" if cfg.rewrite else "edit"
    sources = b"".join(
        path.read_bytes() for path in sorted(Path(synplan.__file__).parent.glob("synplan*.py"))
    )
    digest = hashlib.blake2b(sources + Path(synth.__file__).read_bytes(), digest_size=4).hexdigest()
    path = CACHE / f"synplan-{digest}" / f"{kind}-{cfg.num_pairs}-{cfg.seed}.jsonl"
    if dist.is_main() and not path.exists():
        records, _ = synth.make_pairs(
            "travel", cfg.num_pairs, size="tiny", seed=cfg.seed, rewrite=cfg.rewrite
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, records)
    dist.barrier()
    return path


def recheck(record: dict) -> str:
    """Why a record of synth does not hold by its own database; "" where it does, and for other pairs."""
    return synth.check(record) if "knowledge" in record else ""


def data_of(cfg: Config, chat) -> tuple[list, list[pairs.Pair], str]:
    """Demonstrations and pairs, those that the stage needs, and a line on what was refused."""
    path = Path(cfg.data) if cfg.data else builtin_pairs(cfg)
    told, demonstrations, items = [], [], []
    if cfg.stage != "pref":
        options = {"max_tokens": cfg.max_tokens, "rationale": cfg.rationale}
        demonstrations, refused = pairs.read_demonstrations(path, chat, **options)
        told.append(f"{len(demonstrations)} demonstrations of {path}, {pairs.refusals(refused)}")
    if cfg.stage != "sft":
        options = {"max_tokens": cfg.max_tokens, "truncate": cfg.truncate, "check": recheck}
        items, refused = pairs.read_pairs(path, chat, **options)
        told.append(f"{len(items)} pairs of {path}, {pairs.refusals(refused)}")
    return demonstrations, items, "\n".join(told)


def dry_run(cfg: Config, chat, model, demonstrations, items: list[pairs.Pair]) -> None:
    """Print what a run would do first: what it learns from, its length, memory."""
    for name, one in [("demonstration", demonstrations[:1]), ("chosen, rejected", [*items[:1]])]:
        for record in one:
            for side in record.sides if isinstance(record, pairs.Pair) else (record,):
                print(f"--- first {name}: what is between the brackets is trained on\n{side.show(chat)}")
    sizes = [len(side.ids) for pair in items for side in pair.sides] + [
        len(one.ids) for one in demonstrations
    ]
    print(f"--- {len(demonstrations)} demonstrations, {len(items)} pairs; tokens {pairs.distribution(sizes)}")
    for stage in stages_of(cfg, len(demonstrations), len(items)):
        print(f"--- {stage.name}: {stage.steps} updates of {stage.batch}, learning rate {stage.lr:g}")
    num_params = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gb = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    more = 12 * trained / 1e9 / (1 if cfg.lora_r or cfg.adapter else dist.world())
    print(f"--- {num_params:,} parameters, {trained:,} trained")
    print(f"--- GB a rank, activations apart: weights {gb:.3f}, gradients and AdamW {more:.3f}")


def main(cfg: Config) -> dict:
    """Train, and return what summary.json holds."""
    dist.init(cfg.seed)
    check(cfg, dist.world())
    dist.catch_sigterm()
    chat, model = load_model(cfg)
    held_out = synplan.load(cfg.split, None, n=cfg.eval_n, seed=0) if cfg.eval_n else []
    demonstrations, items, told = data_of(cfg, chat)
    if cfg.dry_run:
        if dist.is_main():
            dry_run(cfg, chat, model, demonstrations, items)
        return {}
    optimizer = training.adamw(model, lr=cfg.lr, weight_decay=cfg.weight_decay)
    fresh = {"step": 0, "stage": "", "before": None, "seconds": 0.0, "reference": ""}
    fresh |= {"moments": None, "multiplier": cfg.dual_start}
    run, state = training.open_run(
        cfg, model, optimizer, fresh, may_change=MAY_CHANGE_ON_RESUME, unit="update"
    )
    run.line(told)
    started = time.perf_counter() - state["seconds"]
    checkpoints = Path(cfg.out) / "checkpoints"
    player = player_of(cfg, chat, model)

    def measure() -> dict[str, float]:
        player.sampler.reset()
        mine = len(share_of(held_out))
        with dist.gathered(model), run.bar(total=mine, unit="plan") as bar:
            episodes = plan_each(player, held_out, seed=cfg.seed, progress=lambda _: bar.update())
        return rates_of(in_order([plan_of(episode) for episode in episodes], total=len(held_out)))

    stages = stages_of(cfg, len(demonstrations), len(items))
    bar = run.bar(total=stages[-1].last, start=state["step"])
    for stage in stages:
        if state["step"] >= stage.last:
            continue
        if state["stage"] not in ("", stage.name):
            # moments of the stage before are of another loss
            optimizer = training.adamw(model, lr=cfg.lr, weight_decay=cfg.weight_decay)
        if held_out and stage is stages[-1] and state["before"] is None:
            state["before"] = measure()
            run.line(f"before {stage.name}: pass rate {state['before']['pass_rate']:.3f}")
        known = prepare(cfg, model, items, stage, state, run) if stage.name == "pref" else None

        for step in range(state["step"] + 1, stage.last + 1):
            # pick
            clock, facts = time.perf_counter(), {}
            chosen = stage.pick(step, cfg.seed)
            mine = share_of(chosen)

            # pack
            if stage.name == "sft":
                own = [demonstrations[i] for i in mine]
                batches = pack(own, [1.0] * len(own), max_tokens=cfg.micro_tokens, device=dist.device())
                num_tokens = sum(demonstrations[i].num_sampled for i in chosen)
                share = functools.partial(sft_share, model, num_tokens=num_tokens)
            else:
                own = [items[i].sides for i in mine]
                batches = pack_pairs(own, max_tokens=cfg.micro_tokens, device=dist.device())
                facts = facts_of(cfg, model, batches, mine, known, state)
                whole = {"mine": mine, "known": known, "facts": facts, "num_pairs": len(chosen), "cfg": cfg}
                share = functools.partial(pref_share, model, **whole)

            # update
            lr = stage.lr_of(step, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            sums = update(model, optimizer, batches, share, cfg)
            if cfg.loss == "cdpo_constrained" and stage.name == "pref" and step % cfg.dual_every == 0:
                state["multiplier"] = ascend(cfg, model, player, step, state["multiplier"])

            # log
            row = {"step": step, "stage": stage.name} | row_of(sums, lr, time.perf_counter() - clock) | facts
            run.metrics(row)
            run.line(headline(row))
            bar.update()

            # save
            state |= {"step": step, "stage": stage.name, "seconds": time.perf_counter() - started}
            if step % cfg.save_every == 0 or step == stage.last:
                checkpoint.save(checkpoints, step, model, optimizer, state)
            if dist.stop_requested():
                break
        if state["step"] < stage.last:
            break

    bar.close()
    if (step := state["step"]) < stages[-1].last:
        if not (checkpoints / f"step_{step}").exists():
            checkpoint.save(checkpoints, step, model, optimizer, state)
        run.line(f"stopped by SIGTERM after update {step}; go on with --resume true and the same flags")
        run.close()
        return {}
    adapted = bool(cfg.lora_r or cfg.adapter)
    training.export(model, Path(cfg.out), folder=chat.folder, base_name=cfg.model, adapted=adapted)
    summary = {"before": state["before"], "after": measure() if held_out else None}
    summary["seconds"] = time.perf_counter() - started
    if held_out:
        run.line(f"{len(held_out)} held-out instances of {cfg.split}, temperature {cfg.temperature:g}")
        run.line(before_after(summary["before"], summary["after"]))
    run.summary(summary)
    run.close()
    return summary


if __name__ == "__main__":
    try:
        main(config.parse(Config))
    except (ValueError, OSError) as error:
        raise SystemExit(f"train_cmdpo.py: {error}") from None
    finally:
        dist.close()
