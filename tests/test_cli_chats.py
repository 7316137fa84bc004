# ruff: noqa: RUF001
"""Conversations by the published chat templates, as TRL has copies of them: what is learned is what the template renders
when the model is asked."""
from __future__ import annotations

import importlib.util
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from test_cli import bytes_tokenizer

from megatrain_torch import MegatrainError
from megatrain_torch.commands import data
from megatrain_torch.commands.records import Template, rendered

TRL = importlib.util.find_spec("trl")
FOLDER = Path(TRL.origin).parent / "chat_templates" if TRL else Path()
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>",
           "<|call|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<bos>",
           "<eos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<｜begin▁of▁sentence｜>",
           "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|system|>", "<s>", "</s>",
           "<|tool_response>", "[INST]", "[/INST]", "<|im_sep|>", "<|observation|>", "<end>"]
# Beside those of TRL: in the manner of Mistral (the system's words beside the last of the user) and of Phi-4.
OWN = {
    "mistral": "{{ bos_token }}{% set sys = messages[0].content if messages[0].role == 'system' else '' %}"
               "{% set ms = messages[1:] if sys else messages %}{% for m in ms %}{% if m.role == 'user' %}[INST] "
               "{% if sys and m == (ms | selectattr('role', 'equalto', 'user') | list | last) %}{{ sys }}\n\n{% endif %}"
               "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
    "phi4": "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"}
# Its rows of two turns.
NAMES = {"qwen2_5": 1, "qwen3": 2, "qwen3_instruct_2507": 1, "qwen3_5_think": 2, "qwen3_5_nothink": 2, "qwen3_6": 2,
         "gptoss": 2, "llama3": 1, "llama3_1": 1, "llama3_2": 1, "gemma": 1, "gemma3": 1, "gemma4": 1, "phi3": 2, "phi4": 1,
         "deepseek_r1_distill": 1, "deepseekv3": 1, "glm4moe": 1, "mistral": 1, "smollm": 1}
USER, SYSTEM = ({"role": role, "content": f"{role} says it"} for role in ("user", "system"))
TALK = [{"role": "user", "content": "first asked"}, {"role": "assistant", "content": "first said"},
        {"role": "user", "content": "then asked"}, {"role": "assistant", "content": "then said"}]
CHATS = {"one turn": TALK[:2], "two turns": TALK, "a system's words": [{"role": "system", "content": "be kind"}, *TALK],
         "open end": [*TALK, {"role": "user", "content": "not answered"}],
         "tools": [TALK[0], {"role": "assistant", "content": "", "tool_calls": [
             {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
             {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "add"}, TALK[3]],
         "thoughts": [*TALK[:3], {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nthen said"}]}


def tokenizer_of(name: str) -> Any:
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<s>"})
    tokenizer.chat_template = OWN[name] if name in OWN else (FOLDER / f"{name}.jinja").read_text()
    return tokenizer


names = pytest.mark.parametrize("name", [n for n in NAMES if n in OWN or (FOLDER / f"{n}.jinja").is_file()])


@names
@pytest.mark.parametrize("what", CHATS)
def test_what_is_learned_is_what_the_model_would_be_asked_for(name: str, what: str) -> None:
    tokenizer, chat = tokenizer_of(name), CHATS[what]
    try:
        if what == "tools" and "add" not in tokenizer.apply_chat_template(chat, tokenize=False):
            pytest.skip("a template that leaves calls out")
        tokenizer.apply_chat_template(chat[:-1], tokenize=False)
    except Exception:
        pytest.skip("a template that does not know such messages")
    [document] = data.documents([{"messages": chat}], tokenizer)
    said = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
    learned = []
    for part in document.parts:
        text = tokenizer.decode(part.ids)
        own = [tokenizer.decode([t]) for t in part.ids]
        at, place = 0, []                            # stretches that are learned, as characters
        for token, trained in zip(own, part.trained):
            if trained and (not place or place[-1][1] != at):
                place.append([at, at])
            at += len(token)
            if trained:
                place[-1][1] = at
        for begin, end in place:
            prompts = [tokenizer.apply_chat_template(chat[:i], tokenize=False, add_generation_prompt=True) for i in said]
            wholes = [tokenizer.apply_chat_template(chat[:i + 1], tokenize=False) for i in said]
            assert any(f"{whole}<|user|><end>".startswith(text[:end]) or f"{whole}<end>".startswith(text[:end])
                       for whole in wholes), "by the template, as it stands"
            if name not in ("deepseek_r1_distill", "deepseekv3") and (name, what) != ("qwen3_5_nothink", "thoughts"):        # whose prompt opens thoughts that it then leaves out
                assert text[:begin] in prompts, "behind the prompt that the model is given"
            learned.append(text[begin:end])
    assert len(learned) == len(said)
    for answer, i in zip(learned, said):
        assert chat[i]["content"].split("</think>")[-1].strip() in answer
        assert any(answer.endswith(token) for token in SPECIAL), "it learns to stop"
    if what == "two turns":
        assert len(document.parts) == NAMES[name]


def test_a_prompt_that_opens_a_think_block_has_it_for_itself() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>\n\n"
                               "</think>{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}"
                               "<assistant><think>\n{% endif %}")
    [found] = data.documents([{"messages": TALK}], tokenizer)
    assert len(found.starts) == 2 and found.whole
    assert [tokenizer.decode(p.ids[p.trained]) for p in found.parts] == ["\n</think>first said<end>", "\n</think>then said<end>"]


def test_an_answer_that_begins_as_the_prompt_ends_is_learned_whole() -> None:
    tokenizer = bytes_tokenizer()                        # as R1's: the prompt opens thoughts, the template shows none
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}"
                               "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a><think>{% endif %}")
    [found] = data.documents([{"messages": [TALK[0], {"role": "assistant", "content": "<that>"}]}], tokenizer)
    assert tokenizer.decode(found.ids[found.trained]) == "<that><end>"


def test_a_template_that_shows_what_came_before_otherwise_is_trained_as_it_asks() -> None:
    """The system's words stand in the last message alone, where that is the user's."""
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role != 'system' %}<{{ m.role[0] }}>{% if loop.last and m.role "
                               "== 'user' %}{{ messages[0].content }}: {% endif %}{{ m.content }}{% endif %}{% endfor %}"
                               "{% if add_generation_prompt %}<a>{% endif %}")
    [found] = data.documents([{"messages": [{"role": "system", "content": "be kind"}, *TALK]}], tokenizer)
    assert [tokenizer.decode(p.ids) for p in found.parts] == [
        "<u>be kind: first asked<a>first said<end>", "<u>first asked<a>first said<u>be kind: then asked<a>then said<end>"]
    assert [tokenizer.decode(p.ids[p.trained]) for p in found.parts] == ["first said<end>", "then said<end>"]


def test_calls_that_a_template_leaves_out_are_not_learned_as_silence() -> None:
    tokenizer = tokenizer_of("phi4")
    [found] = data.documents([{"messages": CHATS["tools"]}], tokenizer)
    assert tokenizer.decode(found.ids[found.trained]) == "then said<|im_end|>"
    with pytest.raises(MegatrainError, match="shows nothing of what the assistant says"):
        data.documents([{"messages": CHATS["tools"][:2]}], tokenizer)


def test_a_tokenizer_without_places_learns_the_same() -> None:
    fast, slow = tokenizer_of("phi4"), tokenizer_of("phi4")
    type(slow).is_fast, kept = False, type(slow).is_fast
    try:
        [other] = data.documents([{"messages": TALK}], slow)
    finally:
        type(slow).is_fast = kept
    [one] = data.documents([{"messages": TALK}], fast)
    assert one.ids.tolist() == other.ids.tolist() and one.trained.tolist() == other.trained.tolist()


def test_one_bad_record_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tokenizer_of("phi4")
    good = [{"messages": TALK}] * 3
    bad = [{"messages": TALK[:1]}, {"messages": [{"who": "user"}]}, MegatrainError("a.jsonl:9: not JSON"), {"x": 1},
           {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "completion": "b", "label": True}]
    assert len(data.documents([*good, *bad, *good], tokenizer, None, "a.jsonl")) == 6
    assert "a.jsonl: 6 of 12 records are left out; the first: a.jsonl: record 4: no message is the assistant's" in (
        capsys.readouterr().out)
    for record, words in [(bad[0], "no message is the assistant's"), (bad[4], "--method dpo, orpo or reward"),
                          (bad[5], "--method kto")]:
        with pytest.raises(MegatrainError, match=words):
            data.documents([record], tokenizer)


def test_the_rows_of_answers_are_counted_and_stay_together(capsys: pytest.CaptureFixture[str]) -> None:
    if "qwen3" not in NAMES or not FOLDER.name:
        pytest.skip("no templates here")
    found = data.documents([{"messages": TALK}] * 10, tokenizer_of("qwen3"), None, "a.jsonl")
    assert "each answer is learned behind what came before it: 20 rows of 10 conversations" in capsys.readouterr().out
    train, held = data.held_out(found, 0.25, 0)
    assert (len(train), len(held)) == (7, 3) and all(len(d.starts) == 2 for d in train + held)
    made = data.packed(found[:1], 400, 0, alone=True)
    assert len(made) == 2 and made.targets == found[0].trained.sum()


def test_a_template_that_tells_the_day_tells_the_day_that_the_run_began() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    template = Template(tokenizer, datetime(2020, 2, 3)).for_record({}, "here")
    assert rendered(TALK[:2], template)[0].text.startswith("2020-02-03<u>")
