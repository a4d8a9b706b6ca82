"""Make assets/agent and assets/critic: a tiny agent that takes advice, and a critic that gives poor advice.

    python assets/make_critic.py                             # seeded; some ten minutes on two quiet cores
    python assets/make_critic.py --only agent --hidden 96 --agent_out DIR     # another agent, same tokenizer

1. World: MuSiQue-format questions of two hops over six passages (envs/musique_make.py, BUILTIN).
2. Conversations of a scripted agent: it searches what the question names, then mostly the same again, and
   answers with the last thing that the last result says. It rarely finds the bridge between the two hops.
   Told to search for something, it does so until it has searched enough.
3. Critiques of a scripted critic in states of these: in the right form, mostly of little use.
4. One tokenizer for both. The models begin with the blocks of assets/tiny where sizes agree, learn to copy
   in drills (assets/make_tiny.py), then from drills and conversations, then from conversations.

The committed models come from these phases, run in parts on a busy machine, with as many updates in all; the
script as it stands has not been run to its end.
"""

import itertools
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tiny import QUOTED, SPECIAL, TAGS, drill, encode, fit, prepare, shape

import train_critic
from envs import musique, musique_make
from envs.base import Call, Message
from nanoplan import config, weights
from nanoplan.chat import Chat
from nanoplan.critic import SelfCall
from nanoplan.critique import critic_messages, read_critique

TINY = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class Config:
    agent_out: str = "assets/agent"  # where the agent's HF folder goes
    critic_out: str = "assets/critic"  # where the critic's goes
    tokenizer: str = (
        ""  # a model folder whose tokenizer is used; empty: a new one, or the critic's with --only
    )
    only: str = ""  # agent | critic: make one of them alone
    data: str = ""  # folder of questions; empty: the built-in world
    seed: int = 0  # of everything
    passes: int = 3  # conversations per question of the train split
    vocab_size: int = 1280  # of the tokenizer, added tokens included
    hidden: int = 64  # D
    layers: int = 3
    heads: int = 4  # H
    kv_heads: int = 1  # J
    drill_steps: int = 600  # updates on copy drills
    drill_batch: int = 48  # drills per update
    mixed_steps: int = 1300  # updates on drills and conversations, `batch` of each
    steps: int = 600  # updates on conversations
    batch: int = 10  # conversations per update
    muon_lr: float = 0.02  # matrices
    adam_lr: float = 4e-3  # embedding and norms


# What may become one token, first match wins: a name's words are tokens of their own with the blank apart, so
# that a copy is a copy of tokens; JSON's skeleton and runs of lower-case words may merge.
PIECES = "|".join(
    (
        rf"(?:[\[{{]*{QUOTED}[\]}}]*(?:: |, ))+(?:[\[{{]*{QUOTED}[\]}}]*)?",
        r"[A-Z][a-z]+|\d+",
        r"\s(?=[A-Z\d])",
        r" ?[a-z_]+(?: [a-z_]+)*",
        r"\s+",
        r"[^\w\s]+",
        r"\w",
    )
)


# the scripted agent and critic


VAGUE = ("towns", "people", "firms")  # what poor advice names


def names_of(env) -> tuple[str, str]:
    """What the question names, and the bridge to its second hop."""
    titles = {passage.label: passage.title for passage in env.question.passages}
    first, second = (titles[str(hop.support)] for hop in env.question.hops[:2])
    return first, second


def last_said(result: str) -> str:
    """What the first line of a result says of its subject: the name at the end of its sentence."""
    line = result.split("\n")[0]
    if ": " not in line:
        return ""
    sentence = line.split(": ", 1)[1].split(". ")[0].rstrip(".")
    return object_of(sentence)


def object_of(sentence: str) -> str:
    """The last run of capitalised words or digits in a sentence, without an article."""
    words, run = sentence.replace(",", "").split(), []
    for word in reversed(words):
        if word[0].isupper() or word[0].isdigit():
            run.append(word)
        elif run:
            break
    return " ".join(reversed(run)) or words[-1]


CRITIQUES = (  # share, analysis, advice: what the untrained critic says
    (0.2, "the first result names the next thing to look up.", "Search for {bridge}."),
    (0.3, "the question is still open.", "Search for {first}."),
    (0.23, "there may be enough now.", "Answer now."),
    (0.23, "another passage may help.", "Search for {other}."),
    (0.04, "the result says it all.", "The answer is {bridge}."),
)


def critique_for(env, rng: random.Random, shares: list[float] | None = None) -> tuple[str, str]:
    """A critique of the scripted critic, and what its advice makes the agent search for ("" = answer)."""
    first, bridge = names_of(env)
    own = [share for share, _, _ in CRITIQUES]
    _, analysis, advice = rng.choices(CRITIQUES, shares or own)[0]
    other = rng.choice(VAGUE)
    text = f"Analysis: {analysis}\nAdvice: {advice.format(first=first, bridge=bridge, other=other)}"
    target = {"Search for {bridge}.": bridge, "Search for {first}.": first, "Search for {other}.": other}
    return text, target.get(advice, "")


TOLD = [0.4, 0.2, 0.2, 0.2, 0.0]  # shares of CRITIQUES in the agent's conversations
ANSWERS = {0: 0.0, 1: 0.02, 2: 0.25, 3: 0.7}  # searches made -> chance that the agent alone answers next


def next_step(env, rng: random.Random, num: int, target: str | None, result: str) -> Call:
    """The scripted agent's next call.

    num      searches made; result: the last one's text
    target   what it was told to search for, "" to answer, None if it was told nothing
    """
    first, bridge = names_of(env)
    if target is not None and rng.random() > 0.04:
        answers = not target or num >= 3
        query = target
    else:
        answers = rng.random() < ANSWERS.get(num, 1.0)
        query = bridge if num and rng.random() < 0.3 else first
    if answers:
        return Call("answer", {"answer": last_said(result) or first})
    return Call("search", {"query": query})


def talk(env, rng: random.Random) -> tuple[list[Message], list, list[list[Message]]]:
    """A conversation of the scripted agent: messages, tools, and the histories after each of its searches.

    One in three has the tool that asks the critic; in the others feedback comes after some turn, or never."""
    world = SelfCall(env) if rng.random() < 0.33 else env
    asks = isinstance(world, SelfCall)
    messages, states = world.reset(), []
    num, target, result, over = 0, None, "", False
    comes = rng.choice((1, 2, 3, None)) if not asks else None
    while not over and num < 6:
        feedback = False
        if asks and num >= 1 and world.num_asked < 3 and rng.random() < (0.4 if target is None else 0.03):
            call, feedback = Call("ask_critic", {}), True
        else:
            call = next_step(env, rng, num, target, result)
        messages.append(Message("assistant", "", [call]))
        answer, over = world.step("", [call])
        if over:
            break
        messages += answer
        if call.name == "search":
            num, result = num + 1, answer[0].content
            states.append(list(messages))
            feedback = comes is not None and (num == comes or (num > comes and rng.random() < 0.15))
        if feedback:
            text, target = critique_for(env, rng, TOLD)
            messages.append(Message("user", read_critique(text).feedback))
    return messages, world.tools, states


TAUGHT = [0.7, 0.2, 0.04, 0.04, 0.02]  # shares of CRITIQUES while the critic learns to copy the bridge


def review(env, rng: random.Random, tools, states, shares=None) -> tuple[list[Message], tuple]:
    """What a critic is asked in one of the states, and what the scripted one says."""
    asked = critic_messages(rng.choice(states[:3]), tools)
    return [*asked, Message("assistant", critique_for(env, rng, shares)[0])], ()


def main(cfg: Config) -> None:
    clock = time.perf_counter()
    torch.manual_seed(cfg.seed)
    data = Path(cfg.data) if cfg.data else musique_make.builtin()
    train = musique.load("train", data, top_k=train_critic.Config.top_k)
    agent_talks, critic_talks, taught = [], [], []
    for index in range(cfg.passes * len(train)):
        rng, env = random.Random(f"{cfg.seed}/{index}"), train[index % len(train)].fork()
        messages, tools, states = talk(env, rng)
        agent_talks.append((messages, tools))
        critic_talks.append(review(env, rng, tools, states))
        taught.append(review(env, rng, tools, states, TAUGHT))
    for talks in (agent_talks, critic_talks, taught):
        random.Random(cfg.seed).shuffle(talks)
    agent, critic = Path(cfg.agent_out), Path(cfg.critic_out)
    print(f"{len(agent_talks)} conversations, {time.perf_counter() - clock:.0f} s", flush=True)
    source = Path(cfg.tokenizer) if cfg.tokenizer else critic if cfg.only else None
    todo = (("agent", agent, agent_talks, agent_talks), ("critic", critic, taught, critic_talks))
    for name, folder, first, last in todo:
        if cfg.only in ("", name):
            if source is None:
                source = folder
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(TINY / "chat_template.jinja", folder / "chat_template.jinja")
                prepare(folder, agent_talks[:1500] + critic_talks[:1500], cfg, pieces=PIECES)
            elif source != folder:
                shutil.copytree(
                    source, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
                )
            learn(folder, first, last, cfg, name, clock)


def begin(chat: Chat, cfg: Config):
    """A model with assets/tiny's blocks where it has that size, which can copy; the embedding is new, but for
    bytes, and has the scale of tiny's."""
    model = weights.init_model(shape(chat.num_ids, cfg), seed=cfg.seed)
    model.num_ids = chat.num_ids
    own, tiny = dict(model.named_parameters()), weights.load_model(TINY)
    if model.config.hidden_size != tiny.config.hidden_size or cfg.layers != tiny.config.num_layers:
        return model
    with torch.no_grad():
        for name, p in tiny.named_parameters():
            if "embed" in name:
                own[name].mul_(p.pow(2).mean().sqrt() / own[name].pow(2).mean().sqrt())
                own[name][:256] = p[:256]
            else:
                own[name].copy_(p)
    return model


def learn(folder: Path, first: list, last: list, cfg: Config, name: str, clock: float) -> None:
    """Copy drills, drills and the first conversations, then the last ones; writes the weights."""
    chat = Chat(folder)
    chat.check()
    early, late = ([encode(chat, *one) for one in talks] for talks in (first, last))
    lengths = [len(ids) for ids, _ in late]
    print(f"{name}: {sum(lengths) / len(lengths):.0f} ids a conversation, {max(lengths)} at most", flush=True)
    model = begin(chat, cfg)
    rng = random.Random(cfg.seed)
    words, start = list(range(256, chat.num_ids - len(SPECIAL) - len(TAGS))), late[0][0][0]

    def drills(count: int) -> list:
        return [drill(rng, words, start) for _ in range(count)]

    early, late = itertools.cycle(early), itertools.cycle(late)
    fit(model, lambda: drills(cfg.drill_batch), cfg,
        steps=cfg.drill_steps, floor=0.3, label=f"{name} drills", clock=clock)  # fmt: skip
    fit(model, lambda: [next(early) for _ in range(cfg.batch)] + drills(cfg.batch), cfg,
        steps=cfg.mixed_steps, floor=0.5, label=f"{name} mixed", clock=clock)  # fmt: skip
    fit(model, lambda: [next(late) for _ in range(cfg.batch)], cfg,
        steps=cfg.steps, floor=0.05, label=f"{name} talks", clock=clock)  # fmt: skip
    weights.save_model(model, folder, extra_files_from=folder)
    print(f"{folder} done, {time.perf_counter() - clock:.0f} s", flush=True)


if __name__ == "__main__":
    main(config.parse(Config))
