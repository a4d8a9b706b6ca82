"""A toy world, a toy tokenizer in Qwen3's format and a tiny random model, shared by tests.

The world is a counter: `add` moves it, `look` reads it, and the answer should be the task's target.
"""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from envs.base import Env, Message, PlanView, Task, Tool, Verdict
from nanoplan.chat import Chat
from nanoplan.model import Model, ModelConfig
from nanoplan.weights import init_model

TEMPLATE = Path(__file__).parents[1] / "assets" / "tiny" / "chat_template.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = ("system user assistant name arguments function add look total number answer counter type object",)
ADD = Tool(
    "add",
    "Add to the counter.",
    {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
)
LOOK = Tool("look", "Read the counter.", {"type": "object", "properties": {}})


class Counter(Env):
    """`before_call`, if given, runs in each call before it acts: to wait, or to raise."""

    def __init__(self, target: int = 7, *, name: str = "toy/0", look_text: str = "", before_call=None):
        super().__init__(Task(name, {"target": target}), [ADD, LOOK])
        self.total, self.look_text, self.before_call = 0, look_text, before_call

    def reset(self) -> list[Message]:
        self.total, self.answer_text, self.done = 0, "", False
        return [Message("system", "Count."), Message("user", f"Reach {self.task.data['target']}.")]

    def call(self, name: str, arguments: dict) -> str:
        if self.before_call is not None:
            self.before_call()
        if name == "add":
            self.total += arguments["number"]
        return self.look_text or f"total {self.total}"

    def verify(self) -> Verdict:
        right = self.answer_text.strip() == str(self.task.data["target"])
        return Verdict(
            right, {"right": right}, {"right": float(not right)}, [] if right else ["wrong answer"]
        )

    def view(self) -> PlanView:
        return PlanView(self.answer_text, {name: 0.5 for name in ("wishes", "route", "pace", "budget")})

    reference_view = view


def write_tokenizer(folder: Path, *, corpus=CORPUS, vocab_size: int = 320) -> Path:
    """Byte-level BPE with some merges, Qwen3's control tokens after the ordinary ids, and the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    stops = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


def tiny_model(chat: Chat, *, seed: int = 0, hidden: int = 32) -> Model:
    """Qwen3 with random weights over the chat's vocabulary."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=chat.num_ids,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=4096,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=True,
        qk_norm=True,
    )
    return init_model(config, seed=seed)


def call_text(name: str, **arguments) -> str:
    """A tool call as a Qwen3 model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def model_ids(folder: Path, text: str) -> list[int]:
    """Ids of a turn that a model could sample: control tokens are single ids, all other characters one id
    each, so that almost no text encodes back to the same ids."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    control, ids, place = {*SPECIAL, *TAGS}, [], 0
    while place < len(text):
        token = next((token for token in control if text.startswith(token, place)), text[place])
        ids += tokenizer.encode(token, add_special_tokens=False).ids
        place += len(token)
    return ids


class ScriptedSampler:
    """The sampler's surface over a script instead of a model: `script(seed, turn)` gives the ids of a turn.

    For behaviour that a random model never shows. A turn begins where the last id was observed; the log-prob
    of the n-th id of a row is -n / 64, which no other id of that row has.
    """

    def __init__(self, script, *, rows: int = 8, max_len: int = 4096):
        self.script, self.free, self.max_len = script, rows, max_len
        self.state: dict[int, dict] = {}  # row -> ids, seed, turn, queue of ids still to say
        self.num_opened, self.num_forked, self.next_row, self.stepped = 0, 0, 0, []

    def _new(self, state: dict) -> int:
        assert self.free > 0, "more rows opened than there are"
        self.free, self.next_row = self.free - 1, self.next_row + 1
        self.state[self.next_row] = state
        return self.next_row

    def open(self, ids, *, seed):
        self.num_opened += 1
        return self._new({"ids": list(ids), "said": [], "seed": seed, "turn": 0, "queue": []})

    def fork(self, row, *, seed):
        self.num_forked += 1
        copied = {
            key: value[:] if isinstance(value, list) else value for key, value in self.state[row].items()
        }
        return self._new({**copied, "seed": seed})

    def extend(self, row, ids):
        self.state[row]["ids"] += ids
        self.state[row]["queue"] = []

    def step(self, rows):
        self.stepped.append(list(rows))
        out, logps = [], []
        for row in rows:
            state = self.state[row]
            if not state["queue"]:
                state["queue"] = list(self.script(state["seed"], state["turn"]))
                state["turn"] += 1
            id = state["queue"].pop(0)
            state["ids"].append(id)
            state["said"].append(id)
            out.append(id)
            logps.append(-len(state["ids"]) / 64)
        return out, logps

    def close(self, row):
        del self.state[row]
        self.free += 1


class Counted(torch.nn.Module):
    """A model that counts the tokens that go through it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.num_ids, self.tokens = model, model.config, model.num_ids, 0

    def forward(self, ids, *args, **options):
        self.tokens += len(ids)
        return self.model(ids, *args, **options)
