"""What the recipes' --tiny takes: a random model, a tokenizer of bytes, a little text. No network."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Torch's threads spin while they wait for each other: the other cores are left to the engine's.
torch.set_num_threads(1)

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"
CHAT = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, one for the end of a text, and a template for conversations."""
    letters = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=letters | {"<end>": 256}, merges=[]))
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", pad_token="<end>", chat_template=CHAT
    )


def model(folder: Path, **more: int) -> str:
    """A folder with a random Llama and its tokenizer, as from the hub."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, bos_token_id=None, eos_token_id=256, **SHAPE | more)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def gpt_oss(folder: Path) -> str:
    """The same of a GPT-OSS whose experts are MXFP4, as published."""
    torch.manual_seed(0)
    shape = SHAPE | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, vocab_size=257)
    GptOssForCausalLM(
        GptOssConfig(**shape, bos_token_id=None, eos_token_id=256)
    ).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, fan_in, fan_out = tensors.pop(name).shape
        form = experts, fan_out, fan_in // 32  # 32 weights of 4 bits in 16 bytes, and their scale
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*form, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, form, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    rest = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": rest}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(folder)
    return str(folder)


def text(path: Path, begin: int = 0, characters: int = 30_000) -> Path:
    """A file with so much of Shakespeare."""
    path.write_text(TEXT.read_text()[begin : begin + characters])
    return path


def _speeches() -> list[str]:
    return [s.partition("\n")[2] for s in TEXT.read_text().split("\n\n")[:400] if len(s) < 150]


def conversations(path: Path) -> Path:
    """A file of {"messages": [...]}: a speech, and what is answered to it."""
    lines = []
    for said, answer in zip(_speeches(), _speeches()[1:]):
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))
    return path


def preferences(path: Path) -> Path:
    """A file of {"prompt", "chosen", "rejected"}: the answer, and the same in capitals."""
    lines = [
        json.dumps({"prompt": said, "chosen": answer, "rejected": answer.upper()})
        for said, answer in zip(_speeches(), _speeches()[1:])
    ]
    path.write_text("\n".join(lines))
    return path
