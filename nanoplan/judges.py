"""A judge from the text of a flag.

    rubric                   the program, at no cost (judge.py)
    http://host/v1#model     a model on a server in OpenAI's form (llm_judge.py)
    local:FOLDER             a model in this process (llm_judge.py, local.py)
    rm:FOLDER                a reward model (reward_model.py)

Options follow as in a web address, "?" first and "&" between:
    https://api.openai.com/v1#gpt-4o?rubric=overall&price_in=2.5&price_out=10
    https://generativelanguage.googleapis.com/v1beta/openai#gemini-2.5-flash?extra={"reasoning_effort":"none"}
    http://127.0.0.1:8000/v1#Qwen/Qwen3-8B?extra={"chat_template_kwargs":{"enable_thinking":false}}
    local:Qwen/Qwen3-4B-Instruct-2507?rows=32
"""

from pathlib import Path

import torch

from nanoplan.judge import Judge, RubricJudge
from nanoplan.llm_judge import LLMJudge
from nanoplan.local import open_model, read_options
from nanoplan.reward_model import RewardModel

JUDGE_OPTIONS = {"rubric": str, "temperature": float, "name": str, "family": str}  # of an LLMJudge
RM_OPTIONS = {"max_len": int}


def open_judge(text: str, *, cache: str | Path | None = None, device: torch.device | str = "cpu") -> Judge:
    """The judge that a flag names. Nothing is asked yet: call `probe` where the judge has it.

    cache   folder of an endpoint's replies; share it between runs, a reply is found by its whole request
    device  of a model in this process
    raises  ValueError for another form, an unknown option or a value that does not fit
    """
    if text == "rubric":
        return RubricJudge()
    address, _, query = text.partition("?")
    if address.startswith("rm:"):
        options = read_options(query, RM_OPTIONS, where=text)
        return RewardModel(address.removeprefix("rm:"), device=device, **options)
    if address.startswith(("local:", "http://", "https://")):
        parts = [part for part in query.split("&") if part]
        own = [part for part in parts if part.partition("=")[0] in JUDGE_OPTIONS]
        others = "&".join(part for part in parts if part not in own)
        options = read_options("&".join(own), JUDGE_OPTIONS, where=text)
        return LLMJudge(open_model(f"{address}?{others}", cache=cache, device=device), **options)
    raise ValueError(f"judge {text!r}; wanted rubric, http://host/v1#model, local:FOLDER or rm:FOLDER")
