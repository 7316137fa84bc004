"""megatrain generate."""
from __future__ import annotations

import argparse
from typing import Any

import torch

import megatrain_torch as mt
from megatrain_torch import MegatrainError

from ..base.codes import coded
from . import folder, lora
from .say import say
from .settings import Settings, add_flags, given
from .unsaid import for_machine

FITS = 0.7                           # of the free device memory, for weights that are put there whole


def add(commands: Any) -> None:
    parser = commands.add_parser("generate", help="let a model write", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a run, a folder in Hugging Face format, or a name on the hub")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="the prompt is a user's message, in the "
                        "chat template; default: as a run was trained, else as it is")
    parser.add_argument("--max-new-tokens", type=int, metavar="N",
                        help="default: 200, and at most what the model takes")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest token")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    add_flags(parser, ("device", "vram", "host", "nvme"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    _check(args)
    settings = for_machine(Settings.of({k: v for k, v in given(args).items() if k != "seed"}, "command line"))
    source = folder.source_of(args.model)
    lora.check_packages(source.adapter is not None, source.base)
    tokenizer = folder.load_tokenizer(source.words)
    if args.chat is None:
        args.chat = bool(tokenizer.chat_template) and folder.is_chat(args.model)
    inputs = _inputs(tokenizer, args.prompt, args.chat)
    new = _new_tokens(args.max_new_tokens, inputs["input_ids"].shape[1], folder.load_config(source.model))
    model = _placed(folder.load(source, source.dtype), settings)
    torch.manual_seed(args.seed)
    sampled = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p} if args.temperature > 0 \
        else {"do_sample": False}
    out = model.generate(**{k: v.to(model.device) for k, v in inputs.items()}, max_new_tokens=new,
                         pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id, **sampled)
    begin = inputs["input_ids"].shape[1] if args.chat else 0
    say(tokenizer.decode(out[0][begin:], skip_special_tokens=True))


def _check(args: argparse.Namespace) -> None:
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise MegatrainError(f"max_new_tokens={args.max_new_tokens}: at least 1 is needed")
    if args.temperature < 0:
        raise MegatrainError(f"temperature={args.temperature}: 0 or more is needed; 0: always the likeliest token")
    if not 0 < args.top_p <= 1:
        raise MegatrainError(f"top_p={args.top_p}: a share is needed, more than 0 and at most 1")


def _new_tokens(asked: int | None, there: int, config: Any) -> int:
    """How many are made after a prompt of `there` tokens."""
    most = getattr(config, "max_position_embeddings", None) or there + 200
    new = asked or min(200, most - there)
    if there + new > most or new < 1:
        raise MegatrainError(f"a prompt of {there} tokens and {max(new, 1)} new ones: the model was made for {most} "
                             "positions at most" + (f"; --max-new-tokens {most - there}" if there < most
                                                    else "; give a shorter prompt"))
    return new


def _inputs(tokenizer: Any, prompt: str, chat: bool) -> dict[str, torch.Tensor]:
    if not chat:
        found = tokenizer(prompt, return_tensors="pt")
        ids = {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}
    elif tokenizer.chat_template:
        ids = dict(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                                 return_tensors="pt", return_dict=True))
    else:
        raise MegatrainError("--chat: the model's tokenizer has no chat template; without --chat the prompt is taken "
                             "as it is")
    if ids["input_ids"].shape[1] == 0:
        raise MegatrainError("the prompt has no tokens: give it some words")
    return ids


def _placed(model: Any, settings: Settings) -> Any:
    """Where there is room for all weights, there; else, and where codes stand for some, streamed."""
    model.eval()
    limits = {"vram": settings.vram, "host": settings.host, "nvme": settings.nvme}
    if not any(limits.values()) and not any(True for _ in coded(model)):
        if settings.device == "cpu":
            return model
        if sum(p.nbytes for p in model.parameters()) < FITS * torch.cuda.mem_get_info()[0]:
            return model.to(settings.device)
    return mt.stream(model.requires_grad_(False), settings.device, **limits)
