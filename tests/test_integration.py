"""The ecosystem, unchanged: HF Trainer, Accelerate, PEFT, generate, save and load.

Each test runs the library's own code on a plain and on a streamed model and compares bit for bit.
"""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import parity
import pytest
import run_dropin
import torch
import zoo
from op_cases import each_device
from parity import assert_same
from parity import stream_for_test as streamed
from run_dropin import Rows, values
from situations import DECODER, hf_loss, llama, text
from torch import nn

import megatrain_torch as mt
from megatrain_torch.model.stream import runtime_of

pytestmark = pytest.mark.filterwarnings("ignore")


# ---------------------------------------------------------------- Trainer, Accelerate, TRL, Lightning

SHORT = {"trainer, autocast", "trainer, recomputing", "trainer, resumed mt.AdamW to its own bits", "trainer, mt.AdamW",
         "accelerate"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else parity.LONG) for n in run_dropin.CHECKS])
def test_stock_trainers_train_to_plain_torchs_bits(name: str) -> None:
    if name == "lightning":                      # not in the test extra
        pytest.importorskip(name)
    row = run_dropin.compare(name, "cpu")
    assert row["ok"], row


# ---------------------------------------------------------------- generate

@each_device
@pytest.mark.parametrize("kind", [dict(do_sample=False), dict(do_sample=True, top_p=0.9), dict(num_beams=3, do_sample=False),
                                  dict(do_sample=False, cache_implementation="static"), dict(do_sample=False, use_cache=False)], ids=str)
def test_generate_equals_plain(kind: dict[str, Any], device: str) -> None:
    out = []
    for wrap in (lambda m: m.to(device), lambda m: streamed(m, device=device)):
        model = wrap(llama()).eval()
        parity.seed()
        ids = text(0)["input_ids"][:, :5].to(model.device)
        out.append(model.generate(ids, max_new_tokens=6, pad_token_id=0, **kind))
    assert torch.equal(out[0], out[1]), f"plain {out[0].tolist()}, streamed {out[1].tolist()}"


def test_generate_in_train_mode_and_then_train() -> None:
    runs = []
    for wrap in (lambda m: m, streamed):
        parity.seed()
        model = wrap(llama())
        ids = model.generate(text(0)["input_ids"][:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
        hf_loss(model, {"input_ids": ids, "labels": ids}).backward()
        runs.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert_same(*runs)


# ---------------------------------------------------------------- save and load

def stepped(model: nn.Module) -> nn.Module:
    zoo.update(hf_loss(model, text(0)), torch.optim.SGD(model.parameters(), lr=0.1))
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_save_pretrained_and_from_pretrained(tmp_path: Path, tied: bool) -> None:
    import transformers as tf
    plain = stepped(llama(tie_word_embeddings=tied))
    model = stepped(streamed(llama(tie_word_embeddings=tied)))
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "streamed")
    names = [sorted(f.name for f in (tmp_path / d).iterdir()) for d in ("plain", "streamed")]
    assert names[0] == names[1]
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "streamed/config.json").read_text()
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (tmp_path / "streamed/model.safetensors").read_bytes()
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "streamed")
    assert_same(values(plain), values(loaded))
    again = stepped(streamed(loaded.train()))
    assert_same(values(stepped(plain)), values(again))


def test_save_pretrained_in_shards(tmp_path: Path) -> None:
    import transformers as tf
    model = stepped(streamed(llama()))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(values(model), values(tf.AutoModelForCausalLM.from_pretrained(tmp_path)))


def test_peft_adapter_saves_loads_and_merges(tmp_path: Path) -> None:
    import peft
    runs = []
    for wrap in (lambda m: m, streamed):
        parity.seed()
        model = wrap(peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])))
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
        for step in range(3):
            zoo.update(hf_loss(model, text(step)), opt)
        folder = tmp_path / str(len(runs))
        model.save_pretrained(folder)
        runs.append((folder / "adapter_model.safetensors").read_bytes())
        if wrap is streamed and not parity.IDENTITY:
            mt.unstream(model)
        runs.append(values(model.merge_and_unload()))
    assert runs[0] == runs[2], "adapter files differ"
    assert_same(runs[1], runs[3])


NAMES = ["layers.0", "layers.1"]


class Checkpointed(zoo.Chain):
    """Has transformers' flag."""

    gradient_checkpointing = False

    def __len__(self) -> int:
        """As modules have that are lists of something: it is false, and there all the same."""
        return 0


@pytest.mark.parametrize("plan, then", [
    ({}, "replay"), ({"activations": "auto"}, "replay"), ({"activations": "saved"}, "saved"),
    ({"activations": {"layers.0": "saved"}}, "saved replay"), ({"activations": dict.fromkeys(NAMES, "saved")}, "saved")])
def test_gradient_checkpointing_is_for_what_no_plan_says(plan: dict[str, Any], then: str) -> None:
    """The model's own is switched off in any case."""
    model = Checkpointed(nn.Linear(4, 4), nn.Linear(4, 4))
    mt.stream(model, "cpu", units=NAMES, plan=plan)
    model.gradient_checkpointing = True
    model(torch.zeros(1, 4)).sum().backward()
    assert [w.keeps for w in runtime_of(model).windows] == (then.split() * 2)[:2] and not model.gradient_checkpointing


def test_device_property_says_where_inputs_go() -> None:
    model = streamed(llama())
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert not hasattr(model, "hf_device_map")
    assert model.num_parameters() == llama().num_parameters()


# ---- the examples in docs/huggingface.md as they stand there, TRL's where it is installed ----

PAGE = Path(__file__).parents[1] / "docs/huggingface.md"
EXAMPLES = dict(re.findall(r"^## (\w+)$(?:(?!^## |```).)*```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE))


def run_example(name: str, **names: Any) -> dict[str, Any]:
    exec(compile(EXAMPLES[name], f"{PAGE} {name}", "exec"), names)
    return names


def test_trainer_trains_and_loads_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    made = run_example("Trainer", path=tmp_path / "model", folder=tmp_path / "out", rows=Rows())
    state = made["trainer"].state
    assert state.global_step == 8 and state.best_model_checkpoint is not None
    assert made["opt"].skipped_steps == 0


def test_accelerate_and_peft_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8)
    made = run_example("Accelerate", model=llama(), loader=loader, folder=str(tmp_path / "state"))
    assert made["norm"] > 0 and (tmp_path / "state/model.safetensors").exists()
    trained = run_example("PEFT", model=llama())["opt"].param_groups[0]["params"]
    assert 0 < sum(p.numel() for p in trained) < llama().num_parameters()


def test_trl_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    import datasets
    import tokenizers as tk
    import transformers as tf
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = tk.Tokenizer(tk.models.WordLevel({f"w{i}": i for i in range(DECODER["vocab_size"])}, unk_token="w3"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    tokenized = datasets.Dataset.from_dict({"input_ids": [Rows()[i]["input_ids"].tolist() for i in range(16)]})
    made = run_example("TRL", model=llama(), folder=tmp_path, tokenized=tokenized, tokenizer=tokenizer)
    assert made["trainer"].state.global_step == 2
