"""Models that several processes load, or make, and stream: what each then has."""
from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from several import digest, refusal
from torch import nn
from zoo import update

import megatrain_torch as mt

SIZE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=500)


def built(kind: str, dtype: torch.dtype, seed: int = 5) -> Any:
    import transformers as tf
    torch.manual_seed(seed)
    if kind == "moe":
        return tf.MixtralForCausalLM(tf.MixtralConfig(**SIZE, num_local_experts=4)).to(dtype)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZE, tie_word_embeddings=kind == "tied")).to(dtype)


def from_files(rank: int, group: Any, folder: str) -> dict[str, Any]:
    """A model of files, with masters where they are of fp32, after a step too; and what this process read and made."""
    import transformers as tf

    from megatrain_torch import _core
    from megatrain_torch.model import stream as pretrained
    read, made, own = [0], [0], (_core.read_file, pretrained.read_pretrained)

    def counted(file: Any, *rest: Any) -> None:
        read[0] += sum(extent[2] for extent in file[2])
        own[0](file, *rest)

    def looked(*args: Any, **kw: Any) -> Any:
        model = own[1](*args, **kw)
        made[0] = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        return model

    asked = {} if group is None else {"group": group}
    with mock.patch.object(_core, "read_file", counted), mock.patch.object(pretrained, "read_pretrained", looked):
        model = mt.from_pretrained(tf.AutoModelForCausalLM, folder, dtype=torch.bfloat16, device="cpu", **asked)
    return {"read": read[0], "made": made[0]} | _stepped(model)


def made_by_the_script(rank: int, group: Any, how: str) -> dict[str, Any]:
    """The first one's model; others have one of other values, or none."""
    model = built("tied", torch.float32, 5 + rank)
    if rank and how == "meta":
        with torch.device("meta"):
            model = built("tied", torch.float32)
    before, ids = list(model.parameters()), [id(p) for p in model.parameters()]
    mt.stream(model, "cpu", dtype=torch.bfloat16, masters=True, **({} if group is None else {"group": group}))
    assert ids == [id(p) for p in model.parameters()] and all(p is q for p, q in zip(before, model.parameters()))
    return _stepped(model)


def _stepped(model: nn.Module) -> dict[str, str]:
    """Once they were loaded, and after a step."""
    noted = {f"buffer {name}": digest(b) for name, b in model.named_buffers()}
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    for step in range(2):
        noted |= {f"{step} {name}": digest(p) for name, p in model.named_parameters()}
        noted |= {f"{step} master {name}": digest(t) for name, t in mt.masters(model).items()}
        model(input_ids=ids, labels=ids).loss.backward()     # the same on all: their mean is one's
        opt.step()
        opt.zero_grad()
    mt.unstream(model)
    return noted


def read_from_a_checkpoint(rank: int, group: Any, folder: str, states: str, part: str) -> tuple[int, int, str]:
    """Of mt.load: bytes that this process read into planes, blocks that it compared besides, and what it said. part:
    of a file's name, that the first rank finds damaged; "": nothing."""
    from megatrain_torch import _core
    model = mt.stream(built("llama", torch.bfloat16, 5 + rank), "cpu", **({} if group is None else {"group": group}))
    opt = mt.AdamW(model.parameters(), states=states)
    found, own = [0, 0], _core.read_file

    def counted(file: Any, sums: Any, threads: int) -> None:
        sizes = [extent[2] for extent in file[2]]
        found[max(sizes, default=1) == 1] += sum(sizes)
        if part and part in file[0] and rank == 0:
            raise mt.MegatrainError("a block is another")
        own(file, sums, threads)

    with mock.patch.object(_core, "read_file", counted):
        said = refusal(lambda: mt.load(model, opt, folder), "")
    mt.unstream(model)
    return *found, said


def saved_by_one(folder: str, states: str) -> int:
    """Bytes of its planes."""
    model = mt.stream(built("llama", torch.bfloat16), "cpu")
    opt = mt.AdamW(model.parameters(), states=states)
    ids = torch.arange(24).view(2, 12)
    update(model(input_ids=ids, labels=ids).loss, opt)
    nbytes = mt.save(model, opt, folder).bytes
    mt.unstream(model)
    return nbytes


def saved_twice(rank: int, group: Any, folder: str) -> tuple[list[int], bool]:
    """Of a model whose first layer is frozen: links that files of the second checkpoint have, and whether what another
    model reads from it is this one's."""
    from megatrain_torch.checkpoint import parts
    with mock.patch.object(parts, "LEAST_BYTES", 1):
        models = [built("llama", torch.float32) for _ in range(2)]
        for model in models:
            model.model.layers[0].requires_grad_(False)
            mt.stream(model, "cpu", group=group)
        opt = mt.AdamW([p for p in models[0].parameters() if p.requires_grad], lr=0.01)
        for name in ("1", "2"):
            update(models[0](input_ids=torch.arange(8).view(1, 8) + rank, labels=torch.arange(8).view(1, 8)).loss, opt)
            mt.save(models[0], opt, f"{folder}/{name}", asynchronous=name == "2").wait()
        mt.load(models[1], None, f"{folder}/2")
        links = sorted(p.stat().st_nlink for p in Path(folder, "2").glob("[fm]*.safetensors"))
        one, other = ([digest(p) for p in m.parameters()] for m in models)
        return links, one == other
