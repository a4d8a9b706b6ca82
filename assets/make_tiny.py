"""Make assets/tiny from nothing: a small tokenizer, and a model that has seen an imperfect planner at work.

    python assets/make_tiny.py --out assets/tiny        # seeded; `make tiny`

1. Worlds: the built-in world's requests, planned by `sloppy_episode`, a scripted agent that searches and
   copies faithfully but chooses badly: it forgets budgets, repeats places, guesses visit times.
2. Tokenizer: byte-level BPE on those conversations, split so that a name is two tokens, a time one.
3. Copy drills: repeat a sequence of tokens that stands further up. Without them supervised learning stays
   on a plateau where plans name no place from the search results.
4. Supervised learning on the conversations, loss on the assistant's tokens, Muon for matrices.
The result is an HF folder that the training scripts start from.
"""

import itertools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs import trips, triptailor
from envs.base import Call, Message
from envs.trip_planner import plan_request, read_results, searches, spoil
from envs.triptailor import to_json
from nanoplan import config, stats, weights
from nanoplan.chat import Chat
from nanoplan.model import ModelConfig, Packed


@dataclass(frozen=True)
class Config:
    out: str = "assets/tiny"  # where the HF folder goes
    seed: int = 0  # of everything
    passes: int = 3  # scripted episodes per request of the train split
    vocab_size: int = 1536  # of the tokenizer, added tokens included
    hidden: int = 64  # D
    layers: int = 3
    heads: int = 4  # H
    kv_heads: int = 1  # J
    drill_steps: int = 1300  # updates on copy drills
    drill_batch: int = 48  # drills per update
    steps: int = 2200  # updates on conversations
    batch: int = 16  # conversations per update
    muon_lr: float = 0.02  # matrices
    adam_lr: float = 4e-3  # embedding and norms


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What may become one token, first match wins. Names are single words, so that a copy is a copy of tokens;
# JSON's skeleton and runs of lower-case words may merge, so that constant text is short.
KEY = r'"[a-z_]+\d*":'  # of compact JSON, as tools and plans are written
QUOTED = r'"(?:[a-z_]*|[A-Z][a-z]+,? [a-z ]+)"'  # a word or a sentence of a tool's schema or a call
PIECES = "|".join(
    (
        rf"(?:[\[{{]*{QUOTED}[\]}}]*(?:: |, ))+(?:[\[{{]*{QUOTED}[\]}}]*)?",  # a tool's schema, a call
        rf'[^\w\s]*{KEY}[\[{{]*(?:"(?!{KEY[1:]}))?',  # a key with what stands around it
        r"\d\d:\d\d|[A-Z]{2}:[A-Z]{2}",  # a time
        r"\d[\d.]*(?:-\d)? (?:hours?|minutes|day)",  # a recommended duration
        r"\d+",  # a price, a number
        r" ?[A-Z]?[a-z_]+(?: [a-z_]+)*",  # a name; words
        r"[A-Z]+",
        r"\s+",
        r"[^\w\s]+",  # punctuation
        r"\w",
    )
)


def train_tokenizer(texts: list[str], vocab_size: int, *, pieces: str = PIECES) -> Tokenizer:
    """Byte-level BPE whose merges stay inside pieces; any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def shape(vocab_size: int, cfg, *, max_positions: int = 4096) -> ModelConfig:
    """A small Qwen3 of the sizes in cfg: hidden, layers, heads, kv_heads."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=vocab_size, hidden_size=cfg.hidden,
        intermediate_size=3 * cfg.hidden, num_layers=cfg.layers, num_heads=cfg.heads,
        num_kv_heads=cfg.kv_heads, head_dim=cfg.hidden // cfg.heads, max_positions=max_positions,
        rope_theta=1e4, norm_eps=1e-6, tied=True, qk_norm=True,
    )  # fmt: skip


def prepare(
    folder: Path, talks: list[tuple], cfg, *, pieces: str = PIECES, max_positions: int = 4096
) -> Chat:
    """Tokenizer and settings of a model folder that holds a chat template, and its chat.

    talks  (messages, tools) of the conversations whose text the tokenizer learns from
    cfg    vocab_size, and what `shape` reads
    """
    # the template needs a tokenizer to render with: a throw-away one first
    write_folder(folder, train_tokenizer(["a"], 300, pieces=pieces), shape(300, cfg))
    chat = Chat(folder)
    texts = [chat.render(messages, tools, prompt=False) for messages, tools in talks]
    tokenizer = train_tokenizer(texts, cfg.vocab_size, pieces=pieces)
    write_folder(folder, tokenizer, shape(tokenizer.get_vocab_size(), cfg, max_positions=max_positions))
    chat = Chat(folder)
    chat.check()
    return chat


def write_folder(folder: Path, tokenizer: Tokenizer, model_config: ModelConfig) -> None:
    """Everything of an HF folder but the weights and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    off = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": token in SPECIAL, **off}
        for token in (*SPECIAL, *TAGS)
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None,
        "model_max_length": model_config.max_positions, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    files = {
        "tokenizer_config.json": tokenizer_config,
        "config.json": model_config.to_hf() | ends,
        "generation_config.json": ends | {"do_sample": True, "temperature": 1.0},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps, for 2-D weights.

    source  K. Jordan et al. 2024, "Muon"; an update's spectral norm is about lr * max(1, rows / columns)^0.5
    """

    def __init__(self, params, *, lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.add_(direction, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to g, roughly: singular values end between 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def drill(rng: random.Random, words: list[int], start: int) -> tuple[list[int], list[bool]]:
    """Random tokens to be repeated; loss on what the copy determines.

    Either a sequence that comes two or three times, or pairs, like names of two words, that come again in
    another order: seeing the first of a pair, the model has to find the second.
    """
    if rng.random() < 0.7:
        once = [rng.choice(words) for _ in range(rng.randint(4, 20))]
        times = rng.randint(2, 3)
        return [start] + once * times, [False] * (len(once) + 1) + [True] * (len(once) * (times - 1))
    pairs = [rng.sample(words, 2) for _ in range(rng.randint(3, 10))]
    again = rng.sample(pairs, len(pairs))
    ids = [start] + [id for pair in pairs + again for id in pair]
    return ids, [False] * (2 * len(pairs) + 1) + [False, True] * len(pairs)


def loss_of(model, samples: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Mean negative log-likelihood, nats per token, of the tokens that are True in the masks."""
    ids, positions, cu, rows, targets = [], [], [0], [], []
    for sample, mask in samples:
        rows += [cu[-1] + t - 1 for t in range(1, len(sample)) if mask[t]]
        targets += [sample[t] for t in range(1, len(sample)) if mask[t]]
        ids += sample[:-1]
        positions += range(len(sample) - 1)
        cu.append(len(ids))
    attend = Packed(torch.tensor(cu, dtype=torch.int32), max(len(sample) - 1 for sample, _ in samples))
    logp, _ = model(
        torch.tensor(ids), torch.tensor(positions), attend, torch.tensor(targets), rows=torch.tensor(rows)
    )
    return -logp.mean()


def fit(model, draw, cfg: Config, *, steps: int, floor: float, label: str, clock: float) -> None:
    """`steps` updates on what `draw()` returns; the learning rate warms up, then falls linearly to a share
    of `floor`."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=cfg.muon_lr),
        torch.optim.AdamW(others, lr=cfg.adam_lr, betas=(0.9, 0.95)),
    ]
    total = 0.0
    for step in range(steps):
        scale = stats.lr_at(step, base=1.0, total=steps, warmup=20, floor=floor, schedule="linear")
        for optimizer, base in zip(optimizers, (cfg.muon_lr, cfg.adam_lr), strict=True):
            optimizer.param_groups[0]["lr"] = base * scale
        loss = loss_of(model, draw())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        if (step + 1) % 100 == 0:
            print(
                f"{label} {step + 1:5d}/{steps}  loss {total / 100:.4f}  {time.perf_counter() - clock:.0f} s",
                flush=True,
            )
            total = 0.0


# mistake of trip_planner.spoil -> share of episodes with it
HABITS = {"slot": 0.35, "repeat_restaurant": 0.2, "repeat_attraction": 0.12, "early": 0.05}


def sloppy_episode(env, rng: random.Random) -> list[Message]:
    """One conversation of the scripted agent, from the prompt to its plan.

    It copies names, times and prices faithfully, and has bad habits, each drawn for the whole episode: it
    does not look at prices, it ignores wishes, it visits every sight for as long as it likes, it goes where
    it has been before, it starts before it has arrived. About two plans in five hold all constraints.
    """
    request = env.request
    messages = env.reset()
    calls = searches(request, flights=rng.random() < 0.15, keywords=rng.random() < 0.25)
    if rng.random() < 0.3:  # forget the hotel class
        calls = [Call(c.name, {k: v for k, v in c.arguments.items() if k != "category"}) for c in calls]
    results = []
    cuts = [calls] if rng.random() < 0.85 else [calls[:2], calls[2:]]
    for part in cuts:
        messages.append(Message("assistant", "", part))
        answers, _ = env.step("", part)
        messages += answers
        results += [answer.content for answer in answers]
    options = read_results(request, calls, results)
    cheap, heed = rng.random() < 0.35, rng.choice((0.3, 0.6, 0.9))
    plan = plan_request(request, options, rng, cheap=cheap, heed=heed, dinners=rng.random() < 0.5)
    for mistake, chance in HABITS.items():
        if rng.random() < chance:
            for _ in range(3 if mistake == "slot" else 1):
                plan = spoil(plan, rng, mistake)
    messages.append(Message("assistant", to_json(plan)))
    return messages


def encode(chat: Chat, messages: list[Message], tools) -> tuple[list[int], list[bool]]:
    """Ids of a conversation as an episode would have them, and which of them the assistant wrote."""
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    ids = chat.open(messages[:first], tools)
    mask = [False] * len(ids)
    observed: list[Message] = []
    for message in messages[first:]:
        if message.role == "assistant":
            delta = chat.observe(observed, stopped=True, tools=tools) if observed else []
            turn = chat.write(message)
            ids, mask = ids + delta + turn, mask + [False] * len(delta) + [True] * len(turn)
            observed = []
        else:
            observed.append(message)
    return ids, mask


def conversations(cfg: Config, envs) -> list[tuple]:
    """(messages, tools) of every scripted episode, in an order drawn from the seed."""
    talks = []
    for index in range(cfg.passes * len(envs)):
        env = envs[index % len(envs)].fork()
        talks.append((sloppy_episode(env, random.Random(f"{cfg.seed}/{index}")), env.tools))
    random.Random(cfg.seed).shuffle(talks)
    return talks


def main(cfg: Config) -> None:
    clock = time.perf_counter()
    torch.manual_seed(cfg.seed)
    out = Path(cfg.out)
    talks = conversations(cfg, triptailor.load("train", trips.builtin(), max_rows=5, hours=False))
    print(f"{len(talks)} conversations, {time.perf_counter() - clock:.0f} s", flush=True)

    grow(cfg, prepare(out, talks[:2000], cfg), talks, clock=clock)


def grow(cfg, chat: Chat, talks: list[tuple], *, max_positions: int = 4096, clock: float) -> None:
    """Make the model from nothing: copy drills, then the conversations; into the chat's folder.

    cfg    seed, drill_steps, drill_batch, steps, batch, and what `shape` and `fit` read
    talks  (messages, tools) of each conversation
    """
    encoded = [encode(chat, *talk) for talk in talks]
    num_ids = sum(len(ids) for ids, _ in encoded) / len(encoded)
    own = sum(sum(mask) for _, mask in encoded) / len(encoded)
    print(f"{num_ids:.0f} ids a conversation, {own:.0f} of them the assistant's", flush=True)
    print(f"{chat.num_ids} ids in all, {time.perf_counter() - clock:.0f} s", flush=True)
    model = weights.init_model(shape(chat.num_ids, cfg, max_positions=max_positions), seed=cfg.seed)
    model.num_ids = chat.num_ids
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    rng = random.Random(cfg.seed)
    seen = Counter(id for ids, mask in encoded for id, own in zip(ids, mask, strict=True) if not own)
    words = sorted(id for id, _ in seen.most_common(600) if id > 255)
    start = encoded[0][0][0]  # <|im_start|>
    fit(model, lambda: [drill(rng, words, start) for _ in range(cfg.drill_batch)], cfg,
        steps=cfg.drill_steps, floor=0.3, label="drills", clock=clock)  # fmt: skip
    order = itertools.cycle(encoded)
    fit(model, lambda: [next(order) for _ in range(cfg.batch)], cfg,
        steps=cfg.steps, floor=0.05, label="talks", clock=clock)  # fmt: skip
    weights.save_model(model, chat.folder, extra_files_from=chat.folder)
    print(f"{chat.folder} done, {time.perf_counter() - clock:.0f} s")


if __name__ == "__main__":
    main(config.parse(Config))
