"""Saved models into the store: straight from the file, with exact masters, and back out in transformers' format."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import update

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import megatrain_torch as mt  # noqa: E402
from megatrain_torch import _core  # noqa: E402
from megatrain_torch.checkpoint import save as checkpoint  # noqa: E402
from megatrain_torch.store.tensorfiles import Mapped, _mappings  # noqa: E402

SIZE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=500, eos_token_id=1, bos_token_id=0)
IDS = torch.arange(24).view(2, 12)


def built(kind: str, **config: Any) -> Any:
    torch.manual_seed(5)
    if kind == "moe":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZE, num_local_experts=4, **config))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, **config))


def stepped(model: Any) -> mt.AdamW:
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    update(model(input_ids=IDS, labels=IDS).loss, opt)
    return opt


@pytest.mark.parametrize("kind, tied", [("llama", True), ("llama", False), ("moe", False)])
def test_a_checkpoint_is_a_folder_that_transformers_reads(tmp_path: Path, kind: str, tied: bool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)
    model = mt.stream(built(kind, tie_word_embeddings=tied).to(torch.bfloat16), device="cpu")
    mt.save(model, stepped(model), tmp_path / "c")
    plain, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and plain.dtype == torch.bfloat16
    own = dict(model.named_parameters())
    assert not [n for n, p in plain.named_parameters() if not torch.equal(p, own[n])]
    again = mt.from_pretrained(type(model), tmp_path / "c", device="cpu")
    mt.load(again, opt2 := mt.AdamW(again.parameters(), lr=1e-2), tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(mt.masters(model).values(), mt.masters(again).values()))
    assert again.lm_head.weight is again.model.embed_tokens.weight or not tied
    assert opt2.state


@pytest.mark.parametrize("how", ["get_peft_model", "add_adapter", "wrapped"])
def test_weights_that_transformers_does_not_know_by_their_names_are_not_read_by_it(tmp_path: Path, how: str) -> None:
    """It would make a model of random weights, with a warning; without a config one of 7 B parameters."""
    peft = pytest.importorskip("peft")

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = built("llama")
            self.config = self.model.config

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs)

    def fresh() -> Any:
        if how == "wrapped":
            return mt.stream(Around(), device="cpu")
        config, model = peft.LoraConfig(r=2, target_modules=["q_proj"]), built("llama")
        if how == "get_peft_model":
            return mt.stream(peft.get_peft_model(model, config), device="cpu")
        model.add_adapter(config)
        return mt.stream(model, device="cpu")

    model = fresh()
    mt.save(model, stepped(model), tmp_path / "c")
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "manifest.json", "states.safetensors", "training.pt", "weights.safetensors"]
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c")
    if how == "get_peft_model":
        model.save_pretrained(tmp_path / "c")
        again = peft.PeftModel.from_pretrained(built("llama"), tmp_path / "c")
        want = peft.get_peft_model_state_dict(model)
        assert not [k for k, v in peft.get_peft_model_state_dict(again).items() if not torch.equal(v, want[k])]
    other = fresh()
    mt.load(other, mt.AdamW(other.parameters(), lr=1e-2), tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_weights_are_read_from_the_file_itself_and_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = built("llama").to(torch.bfloat16)
    plain.save_pretrained(tmp_path)
    read: list[int] = []
    real = _core.read_file

    def counted(file: Any, sums: Any, threads: int) -> None:
        read.append(sum(nbytes for _, _, nbytes, _ in file[2]))
        real(file, sums, threads)

    monkeypatch.setattr(_core, "read_file", counted)
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, device="cpu")
    assert sum(read) == sum(p.nbytes for p in model.parameters())
    assert not [n for n, p in plain.named_parameters() if not torch.equal(p, model.get_parameter(n))]


def test_a_mapping_that_was_written_to_is_memory_like_any_other(tmp_path: Path) -> None:
    built("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert Mapped().source(model.lm_head.weight.detach()) is not None
    with torch.no_grad():
        model.lm_head.weight[3] = 7.0
    assert Mapped().source(model.lm_head.weight.detach()) is None
    assert (mt.stream(model, device="cpu").lm_head.weight[3] == 7).all()


def test_the_kernel_is_not_asked_about_pages_where_nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through all of a process's pages to answer: seconds of a large one."""
    monkeypatch.setattr("megatrain_torch.store.tensorfiles._mappings", lambda text: pytest.fail("it was asked"))
    mt.stream(built("llama"), device="cpu")


def test_two_views_of_the_same_bytes_of_a_file_both_have_them(tmp_path: Path) -> None:
    safetensors.save_file({"all": torch.arange(4096.0).view(64, 64)}, tmp_path / "f.safetensors")
    whole = safetensors.load_file(tmp_path / "f.safetensors")["all"]
    model = torch.nn.ParameterDict({"whole": torch.nn.Parameter(whole), "part": torch.nn.Parameter(whole[16:48]),
                                    "end": torch.nn.Parameter(whole[48:])})
    wanted = {name: p.detach().clone() for name, p in model.items()}
    mt.stream(model, device="cpu")
    assert not [name for name, p in model.items() if not torch.equal(p, wanted[name])]
    fresh = [torch.empty(n, 64) for n in (64, 32)]
    left = Mapped().fill([(fresh[0], whole), (fresh[1], whole[16:48])])
    assert [memory.shape[0] for memory, _ in left] == [32] and torch.equal(fresh[0], whole)


def test_what_the_system_does_not_say_is_not_believed(tmp_path: Path) -> None:
    """A system whose smaps lack a field, or a file that was replaced since."""
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    about = path.stat()
    head = f"1000-2000 rw-p 00000000 {about.st_dev >> 8:02x}:{about.st_dev & 255:02x} {about.st_ino}     {path}\n"
    fields = "Rss:   4 kB\nAnonymous:     0 kB\nSwap:     0 kB\nVmFlags: rd\n"
    assert _mappings(head + fields)
    assert not _mappings(head + fields.replace("Swap:", "Swop:"))
    assert not _mappings(head + fields.replace("Anonymous:     0", "Anonymous:     4"))
    assert not _mappings(head.replace(f"{about.st_ino} ", f"{about.st_ino + 1} ") + fields)
    assert not _mappings(head.replace(str(path), f"{path} (deleted)") + fields)


@pytest.mark.parametrize("home", ["ram", "vram"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_fp32_files_give_exact_masters(tmp_path: Path, kind: torch.dtype, home: str) -> None:
    plain = built("llama")
    plain.save_pretrained(tmp_path)
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, dtype=kind, device="cpu", plan={"homes": home})
    values = dict(plain.named_parameters())
    assert not [n for n, p in model.named_parameters() if not torch.equal(p, values[n].to(kind))]
    assert not [n for n, m in mt.masters(model).items() if not torch.equal(m, values[n])]
    other = mt.stream(built("llama"), device="cpu", dtype=kind)                # begins with rounded ones
    one = mt.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for m, opt in ((model, one), (other, mt.AdamW(other.parameters(), lr=0.0, weight_decay=0.0))):
        m(input_ids=IDS, labels=IDS).loss.backward()
        opt.step()
    mt.model.stream.runtime_of(model).drain()
    assert mt.model.stream.runtime_of(model).core.host_bytes() == 0 or home == "ram", "masters were made a unit at a time"
    assert not [n for n, m in mt.masters(model).items() if not torch.equal(m, values[n])]
    assert [n for n, m in mt.masters(other).items() if not torch.equal(m, values[n])]
    for n, p in model.named_parameters():              # bf16: rounded to nearest, but ties to either side
        torch.testing.assert_close(p.float(), values[n], rtol=2**-8, atol=2**-24)
