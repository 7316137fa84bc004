"""Conversations as a model's own chat template writes them, with the places of the assistant's answers.

What is trained is what the template renders at inference. An answer begins where the generation prompt ends, behind a
think block that the prompt opens, and ends with its end token. Where the whole conversation shows each answer as it was
when it was made, one rendering serves all. Else (a template that takes thoughts out of earlier answers, or moves the
system's words) each answer has a rendering of its own, with what came before it.
"""
from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatrain_torch import MegatrainError

from .settings import from_json

Message = dict[str, Any]
# ShareGPT's names, {"from": ..., "value": ...}, for those of chat templates.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
            "tool": "tool", "observation": "tool"}
_NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_PROBE = "\ue000"                    # stands in no data: a letter of the private area


@dataclass(frozen=True)
class Chat:
    """A text, and [begin, end) of each answer in it."""

    text: str
    answers: list[tuple[int, int]]


class Template:
    """The tokenizer's chat template, with what the record at hand has for it beside its messages."""

    def __init__(self, tokenizer: Any, date: datetime | None = None) -> None:
        """date: for templates that tell the model which day it is; a run that goes on has that of its beginning."""
        self._tokenizer, self.where, self._more = tokenizer, "", {}
        # By its text: functions are not passed on to a template.
        text = tokenizer.chat_template
        self._dated = {"chat_template": _NOW.sub(lambda m: repr(date.strftime(m[2])), text)} if date and isinstance(
            text, str) else {}
        self.ends = tuple(tokenizer.get_added_vocab())           # what may end an answer

    def for_record(self, record: dict[str, Any], where: str) -> Template:
        if not self._tokenizer.chat_template:
            raise MegatrainError(f"{where} is a conversation, and the model's tokenizer has no chat template: take an "
                                 "instruction-tuned model's tokenizer, --chat-template FILE, or data with prompt and "
                                 "completion")
        tools, more = record.get("tools"), record.get("chat_template_kwargs") or {}
        if isinstance(tools, str) and tools:         # tables keep what differs from row to row as JSON
            tools = from_json(tools, f"{where}: tools")
        if not isinstance(tools or [], list) or not isinstance(more, dict):
            raise MegatrainError(f"{where}: tools must be a list of tools, and chat_template_kwargs an object")
        self.where, self._more = where, {**self._dated, **more, "tools": tools or None}
        return self

    def __call__(self, messages: list[Message], prompt: bool = False) -> str:
        """The text; prompt: as the model is given it to answer."""
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt,
                                                       **self._more)
        except Exception as why:                     # a template is a program, and raises what it likes
            raise MegatrainError(f"{self.where}: the chat template does not take it: {why}") from None


def messages_of(found: list[Any], where: str) -> list[Message]:
    """With `role` and `content`, whichever of the two ways they are written."""
    made = []
    for number, message in enumerate(found, 1):
        if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
            if str(message["from"]) not in SPEAKERS:
                raise MegatrainError(f"{where}: message {number} is from {message['from']!r}, and known are "
                                     f"{', '.join(SPEAKERS)}; rename it, or write messages with `role` and `content`")
            message = {"role": SPEAKERS[message["from"]], "content": message["value"]}
        if not isinstance(message, dict) or not {"role"} < message.keys():
            has = ", ".join(map(repr, message)) if isinstance(message, dict) else repr(message)
            raise MegatrainError(f"{where}: message {number} has {has}; `role` (user, assistant) and `content` are "
                                 "needed")
        made.append({k: v for k, v in message.items() if v is not None or k == "content"})
    return made


def rendered(messages: list[Message], template: Template, first: int = 0) -> list[Chat]:
    """The texts to train: one, or one for each answer. first: the message from which on answers are learned."""
    said = [i for i, m in enumerate(messages) if i >= first and m["role"] in ("assistant", "model")]
    if not said:
        raise MegatrainError(f"{template.where}: no message is the assistant's, and nothing else is learned of a "
                             "conversation")
    each = []
    for i in said:
        chat = _answered(messages[:i + 1], template)
        text = chat.text[slice(*chat.answers[0])].strip()    # "": a call of tools that the template leaves out
        if text.removesuffix(next((t for t in template.ends if text.endswith(t)), "")).strip():
            each.append(chat)
    if not each:
        raise MegatrainError(f"{template.where}: the chat template shows nothing of what the assistant says")
    try:
        whole = template(messages[:said[-1] + 1])
    except MegatrainError:
        whole = ""
    if not all(whole.startswith(chat.text) for chat in each):
        return each
    places = []
    for chat in each:                                # where the next speaker's name is what ends an answer, that too
        [(begin, end)] = chat.answers
        stops = [t for t in template.ends if whole.startswith(t, end) and not chat.text.endswith(template.ends)]
        places.append((begin, end + len(stops[0] if stops else "")))
    return [Chat(whole[:places[-1][1]], places)]


def _answered(messages: list[Message], template: Template) -> Chat:
    """Up to the end of the last message, which is learned."""
    text, before = template(messages), messages[:-1]
    try:
        prompt = template(before, prompt=True)
    except MegatrainError:                           # nobody spoke before, and the template wants somebody
        prompt = text[:_begin_of_content(messages, text, template)]
    begin = _same(prompt, text)
    if begin < len(prompt):                          # the answer is not shown as the prompt asks for it
        content = _begin_of_content(messages, text, template)
        if before and not text.startswith(template(before)):
            text, begin = prompt + text[content:], len(prompt)   # nor is what came before it
        else:
            begin = min(begin, content)              # letters of the answer may be those of the prompt by chance
    end = len(text.rstrip())
    text = text[:end] if text.endswith(template.ends, 0, end) else text
    return Chat(text, [(begin, len(text))])


def _begin_of_content(messages: list[Message], text: str, template: Template) -> int:
    with contextlib.suppress(MegatrainError):
        return _same(template([*messages[:-1], {**messages[-1], "content": _PROBE}]), text)
    return len(text)


def _same(one: str, other: str) -> int:
    """Letters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
