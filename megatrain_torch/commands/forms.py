"""Records of instructions and of questions, as conversations or as prompts: nothing that they ask is lost.

    {"instruction", "input", "output"}   {"question", "answer"}   {"system_prompt", "question", "response"} ...

A tokenizer with a chat template gets a conversation; another Alpaca's prompt, or `Question: ... Answer: ...`.
"""
from __future__ import annotations

from typing import Any

from megatrain_torch import MegatrainError

Record = dict[str, Any]
KNOWN = ("messages", "conversations", "prompt", "text")      # fields that data.py reads, first come first
ASKED = ("instruction", "question", "query")
BESIDE = ("context", "input")                # what an instruction or a question is about
ANSWERED = ("output", "answer", "response", "completion")
SYSTEM = ("system", "system_prompt")
FIRST = {"instruction": "output", "question": "answer"}      # the answer that belongs to it, where there are several
_ALPACA = ("Below is an instruction that describes a task{beside}. Write a response that appropriately completes the "
           "request.\n\n### Instruction:\n{asked}\n\n{input}### Response:\n")


def read(record: Record, chat: bool, where: str) -> Record:
    """A record as data.py has it: with `messages`, `prompt` and `completion`, or `text`; as it is where it has one.

    Args:
        chat: the tokenizer has a chat template.

    Raises:
        MegatrainError: it asks for what cannot be said without one; or has beside a prompt what would be lost.
    """
    record = _lowered(record)
    if {"chosen", "rejected"} <= record.keys():
        raise MegatrainError(f"{where} is a preference (chosen, rejected): --method dpo, orpo or reward trains on such")
    if isinstance(record.get("label"), bool) and {"prompt", "completion"} <= record.keys():
        raise MegatrainError(f"{where} is a completion with a label, good or bad: --method kto trains on such")
    if any(name in record for name in KNOWN[:3]):
        return _checked(record, where)
    asked = [name for name in ASKED if _said(record, name)]
    beside = [name for name in BESIDE if _said(record, name)]
    if not asked and beside[-1:] == ["input"] and "text" not in record:      # {"input", "output"}
        asked, beside = beside[-1:], beside[:-1]
    answer = next((name for name in (FIRST.get(asked[0] if asked else ""), *ANSWERED) if name in record), None)
    if not asked or answer is None:
        return record
    for name in (*asked, *beside, answer, *SYSTEM):
        if not isinstance(record.get(name) or "", str):
            raise MegatrainError(f"{where}: {name} is a {type(record[name]).__name__}: a text is needed")
    if record[answer] is None:
        raise MegatrainError(f"{where}: {answer} is null: a text is needed")
    return (_conversation if chat else _prompt)(record, asked, beside, answer, where)


def asked(record: Record, chat: bool, where: str) -> Record:
    """A record of preferences, or of what is to be answered, with what it asks as its `prompt`."""
    record = _lowered(record)
    questions = [name for name in ASKED if _said(record, name)]
    if not questions or any(name in record for name in KNOWN[:3]):
        return record
    beside, made = [name for name in BESIDE if _said(record, name)], dict(record)
    for name in [n for n in ("chosen", "rejected", "completion") if isinstance(record.get(n), str)] or [""]:
        found = (_conversation if chat else _prompt)({**record, "": ""}, questions, beside, name, where)
        made |= {"prompt": found["prompt"]} | ({name: found["completion"]} if name else {})
    return made


def _lowered(record: Record) -> Record:
    """With names in small letters, as tables write them large; what is there in both stays as it is."""
    if any(name in record for name in (*KNOWN, *ASKED)):
        return record
    small = {name.strip().lower(): value for name, value in record.items() if isinstance(name, str)}
    return small if len(small) == len(record) else record


def _said(record: Record, name: str) -> bool:
    return record.get(name) not in (None, "")


def _checked(record: Record, where: str) -> Record:
    """Beside a prompt of words nothing is asked that would not be learned to be answered."""
    lost = [name for name in (*ASKED, *BESIDE, *SYSTEM) if isinstance(record.get(name), str) and _said(record, name)]
    if "prompt" in record and "messages" not in record and "conversations" not in record and lost:
        raise MegatrainError(f"{where} has {lost[0]!r} beside prompt, which would not be learned: put both into "
                             "prompt, or rename prompt to instruction")
    return record


def _conversation(record: Record, asked: list[str], beside: list[str], answer: str, where: str) -> Record:
    system = [record[name] for name in SYSTEM if _said(record, name)]
    made = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for turn in _history(record, where):
        made += [{"role": role, "content": words} for role, words in zip(("user", "assistant"), turn)]
    made += [{"role": "user", "content": "\n\n".join(record[name] for name in (*asked, *beside))},
             {"role": "assistant", "content": record[answer]}]
    more = {name: record[name] for name in ("tools", "chat_template_kwargs") if name in record}
    return {"prompt": made[:-1], "completion": made[-1:], **more}


def _prompt(record: Record, asked: list[str], beside: list[str], answer: str, where: str) -> Record:
    if _history(record, where):
        raise MegatrainError(f"{where} has a history, and the model's tokenizer has no chat template: take an "
                             "instruction-tuned model's tokenizer")
    about = "\n\n".join(record[name] for name in beside)
    words = "\n\n".join(record[name] for name in asked)
    head = "".join(f"{record[name]}\n\n" for name in SYSTEM if _said(record, name))
    if asked[0] == "question":
        body = f"{about}\n\nQuestion: {words}\nAnswer:" if about else f"Question: {words}\nAnswer:"
        return {"prompt": head + body, "completion": f" {record[answer]}"}
    body = _ALPACA.format(asked=words, input=f"### Input:\n{about}\n\n" if about else "",
                          beside=", paired with an input that provides further context" if about else "")
    return {"prompt": head + body, "completion": record[answer]}


def _history(record: Record, where: str) -> list[list[str]]:
    """Turns before: pairs of what was asked and answered, oldest first."""
    found = record.get("history") or []
    if isinstance(found, list) and all(isinstance(turn, (list, tuple)) and len(turn) == 2
                                       and all(isinstance(words, str) for words in turn) for turn in found):
        return [list(turn) for turn in found]
    raise MegatrainError(f"{where}: history must be a list of pairs: what was asked, and what was answered")
