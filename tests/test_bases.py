"""Frozen bases that are codes of other packages: streamed, they give the bits of the same model run by its package.

bitsandbytes and torchao, each with LoRA beside it. MEGATRAIN_FULL=1: every architecture, way of keeping and home."""
from __future__ import annotations

import copy
import functools
import gc
import json
import math
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import parity
import pytest
import torch
from parity import assert_same
from torch import Tensor, nn
from zoo import update

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes", reason="the extra `bases` has it; test_bases_apart.py")
torchao = pytest.importorskip("torchao", reason="the extra `bases` has it; test_bases_apart.py")

import megatrain_torch as mt  # noqa: E402
from megatrain_torch import ops  # noqa: E402
from megatrain_torch.graph import frames  # noqa: E402
from megatrain_torch.plans import shapes  # noqa: E402

DEVICE = "cpu"                 # tests/gpu has another
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=48, head_dim=16, max_position_embeddings=64)
ARCHES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "deep": lambda: transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 5}),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
}


def four_bits(kind: str, **settings: Any) -> Any:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind,
                                           bnb_4bit_compute_dtype=torch.bfloat16, **settings)


def made(name: str) -> Any:
    import torchao.quantization as q
    return transformers.TorchAoConfig(getattr(q, name)())


FORMATS: dict[str, Callable[[], Any]] = {
    "nf4": lambda: four_bits("nf4"),
    "nf4-double": lambda: four_bits("nf4", bnb_4bit_use_double_quant=True),
    "nf4-in-bf16": lambda: four_bits("nf4", bnb_4bit_quant_storage=torch.bfloat16),
    "fp4": lambda: four_bits("fp4"),
    "fp4-double": lambda: four_bits("fp4", bnb_4bit_use_double_quant=True),
    "int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "int8-threshold-0": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "torchao-int8": lambda: made("Int8WeightOnlyConfig"),
    "torchao-float8": lambda: made("Float8WeightOnlyConfig"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def of(arch: str) -> Path:
        parity.seed()
        at = tmp_path_factory.mktemp(arch)
        transformers.AutoModelForCausalLM.from_config(ARCHES[arch](), dtype=torch.bfloat16).save_pretrained(at)
        return at
    return of


def base(folder: Path, form: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=FORMATS[form](),
                                                             dtype=torch.bfloat16)


def with_adapter(model: nn.Module, **more: Any) -> nn.Module:
    parity.seed()
    targets = "all-linear"
    if model.config.model_type == "mixtral":         # whose experts, and router, are no Linear: nobody quantises them
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **more)
    return peft.get_peft_model(model, config).train()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trained(model: nn.Module, steps: int = 3, optimizer: Any = torch.optim.AdamW, lr: float = 1e-2) -> list[Tensor]:
    return parity.losses_and_grads(model, map(batch, range(steps)), optimizer, lr)


def adamw(model: nn.Module) -> mt.AdamW:
    return mt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, max_grad_norm=1.0)


def losses(model: nn.Module, opt: mt.AdamW, *steps: int) -> list[Tensor]:
    return [update(model(**batch(step)).loss, opt) for step in steps]


def streamed(model: nn.Module, how: str, home: str = "ram", folder: Path | None = None) -> nn.Module:
    return doors.stream(model, "cpu", compute="eager", nvme=str(folder) if "disk" in home else None,
                        plan={"activations": how, "slots": 2, "homes": home,
                              "debug": {"poison": True, "delay_us": 200}})


ALL = [(a, f, k, h) for a in ("llama", "qwen3", "mixtral") for f in FORMATS for k in ("replay", "saved")
       for h in ("ram", "vram", "disk", "disk+weights")]
SOME = [("llama", "nf4-double", "replay", "ram"), ("llama", "nf4", "saved", "disk+weights"),
        ("qwen3", "fp4", "replay", "vram"), ("llama", "int8", "replay", "ram"),
        ("qwen3", "int8", "saved", "disk+weights"), ("llama", "torchao-int8", "replay", "disk+weights"),
        ("mixtral", "torchao-float8", "replay", "ram")]


@pytest.mark.parametrize(("arch", "form", "how", "home"), ALL if parity.FULL else SOME)
def test_a_base_of_codes_trains_to_its_packages_bits(arch: str, form: str, how: str, home: str, tmp_path: Path,
                                                     folder: Callable[[str], Path]) -> None:
    model = with_adapter(base(folder(arch), form))
    wanted = trained(copy.deepcopy(model))
    assert_same(trained(streamed(model, how, home, tmp_path)), wanted)


# ---- what else is done with such a model ---------------------------------------------------------

@pytest.mark.parametrize("how", ["saved", "replay"])
@pytest.mark.parametrize("form", ["nf4", "nf4-double"])
def test_dora_trains_over_codes(form: str, how: str, folder: Callable[[str], Path]) -> None:
    """PEFT reads the base's weight in the adapter's forward, and on a CPU puts it there anew."""
    plain = with_adapter(base(folder("llama"), form), use_dora=True)
    assert_same(trained(streamed(copy.deepcopy(plain), how)), trained(plain))


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, t in wanted.items():
        for piece in (t.__tensor_flatten__()[0] if hasattr(t, "qdata") else [""]):
            a, b = ((getattr(x, piece) if piece else x).detach() for x in (found[name], t))
            a, b = (x.reshape(-1).clone().view(torch.uint8) if x.dtype == y.dtype else x for x, y in ((a, b), (b, a)))
            assert torch.equal(a, b), f"{name} {piece}"      # codes kept as bf16 may be its NaN


LIBRARIES = ("nf4-double", "int8", "torchao-float8")


@pytest.mark.parametrize("form", FORMATS if parity.FULL else LIBRARIES)
def test_it_is_copied_and_given_back_as_its_packages_model(form: str, folder: Callable[[str], Path], tmp_path: Path
                                                           ) -> None:
    model = with_adapter(base(folder("llama"), form))
    plain = copy.deepcopy(model)
    kinds = [type(p) for p in model.parameters()]
    streamed(model, "replay", "disk+weights", tmp_path)
    assert_same_state(model.state_dict(), plain.state_dict())
    assert all(isinstance(p, kind) for p, kind in zip(model.parameters(), kinds)), "a class that others ask for"
    assert_same(trained(copy.deepcopy(model), 1), wanted := trained(plain, 1))
    assert_same(trained(model, 1), wanted)
    mt.unstream(model)
    assert [type(p) for p in model.parameters()] == kinds
    assert_same_state(model.state_dict(), plain.state_dict())
    assert_same(trained(model, 1), trained(plain, 1))


@pytest.mark.parametrize("form", FORMATS if parity.FULL else LIBRARIES)
def test_what_it_saves_its_package_loads(form: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    plain = base(folder("llama"), form)
    model = streamed(base(folder("llama"), form), "replay", "vram")
    model.save_pretrained(tmp_path / "theirs")
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert_same_state(load(tmp_path / "theirs").state_dict(), plain.state_dict())
    mt.save(model, None, tmp_path / "ours")
    if not form.startswith("torchao"):
        assert_same_state(load(tmp_path / "ours").state_dict(), plain.state_dict())


@pytest.mark.parametrize(("form", "home"), [
    ("nf4-double", "disk+weights"), pytest.param("int8", "ram", marks=parity.LONG),
    pytest.param("torchao-int8", "vram", marks=parity.LONG)])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(form: str, home: str, folder: Callable[[str], Path],
                                                            tmp_path: Path) -> None:
    def fresh() -> nn.Module:
        return streamed(with_adapter(base(folder("llama"), form)), "replay", home, tmp_path)

    model = fresh()
    losses(model, opt := adamw(model), 0, 1)
    mt.save(model, opt, tmp_path / "at2")
    wanted, again = losses(model, opt, 2, 3), fresh()
    with torch.no_grad():                    # other codes: those of the checkpoint have to come
        for p in again.parameters():
            if p.dtype in (torch.uint8, torch.int8):
                p.zero_()
    mt.load(again, opt := adamw(again), tmp_path / "at2")
    assert_same(losses(again, opt, 2, 3), wanted)


@pytest.mark.parametrize("form", LIBRARIES)
@pytest.mark.parametrize("how", ["replay", "saved"])
def test_no_product_holds_a_slots_memory(form: str, how: str, folder: Callable[[str], Path],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the device had all codes in the end: bitsandbytes keeps them as attributes of ctx."""
    from megatrain_torch.model import ring
    held = []
    own = ring.Ring._renew
    monkeypatch.setattr(ring.Ring, "_renew", lambda self, slot: held.append(slot) or own(self, slot))
    trained(streamed(with_adapter(base(folder("deep"), form)), how), 1)
    assert not held


def test_a_streamed_model_of_codes_is_freed_at_once(folder: Callable[[str], Path]) -> None:
    for form in ("nf4-double", "int8"):
        model = streamed(with_adapter(base(folder("llama"), form)), "replay")
        trained(model, 1)
        runtime = weakref.ref(next(model.parameters())._mt_runtime)
        gc.disable()
        try:
            del model
            assert runtime() is None, "a circle keeps it"
        finally:
            gc.enable()


def test_codes_are_counted_as_what_they_are(folder: Callable[[str], Path]) -> None:
    model = base(folder("llama"), "nf4")
    layer_of = shapes.shapes_of(model)("fp32").windows[1]
    assert layer_of.kind == "layer" and len(layer_of.products) == 7 and layer_of.dense == (2 * 64 * 128, 0)
    assert layer_of.template.expanded == (2 * 64 * 256, 2 * sum(p.fan_in * p.fan_out for p in layer_of.products))
    assert mt.plan(model, tokens=24, seq=12, machine="cpu").seconds > 0
    codes = sum(p.numel() for p in model.model.layers[0].parameters() if p.dtype == torch.uint8)
    assert codes * 2 == sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(
        ARCHES["llama"]()).model.layers[0].parameters() if p.dim() > 1)
    streamed(model, "replay")
    rt = next(model.parameters())._mt_runtime
    assert codes < rt.core.hi_bytes(rt.unit_names.index("model.layers.0")) < codes * 2


# ---- refused by name -----------------------------------------------------------------------------

def test_what_would_be_wrong_is_refused(folder: Callable[[str], Path]) -> None:
    model = base(folder("llama"), "nf4")
    with pytest.raises(mt.MegatrainError, match="is quantised, and codes and scales keep their types"):
        mt.stream(model, "cpu", dtype=torch.bfloat16)
    layer = nn.Sequential(*(bnb.nn.Linear4bit(64, 64) for _ in range(2)))
    with pytest.raises(mt.MegatrainError, match=r"'0.weight' \(bitsandbytes 4 bits\) is not quantised yet"):
        mt.stream(layer, "cpu")
    mt.stream(layer.to("cpu"), "cpu")
    with pytest.raises(mt.MegatrainError, match=r"is quantised, and so it must be frozen|anew in each forward"):
        mt.stream(nn.Sequential(bnb.nn.Linear8bitLt(64, 64)), "cpu")
    import torchao.quantization as q
    linear = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    q.quantize_(linear, q.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(mt.MegatrainError, match="has its activations quantised too"):
        mt.stream(linear, "cpu")


def test_a_class_that_is_not_known_is_refused_with_what_would_work() -> None:
    class Odd(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Odd(torch.zeros(2, 2))
    with pytest.raises(mt.MegatrainError, match=r"test_bases\.Odd.*bitsandbytes 4 bits; bitsandbytes LLM.int8; torchao"):
        mt.stream(model, "cpu")


def test_an_adapter_merged_into_codes_is_refused_at_the_next_pass(folder: Callable[[str], Path]) -> None:
    model = streamed(with_adapter(base(folder("llama"), "nf4")), "replay")
    with pytest.warns(UserWarning, match="Merge lora module to 4-bit"):
        model.merge_adapter()
    with pytest.raises(mt.MegatrainError, match="was put into the model"):
        model(**batch(0))


# ---- bases made, or kept, while a checkpoint is read ---------------------------------------------

BLOCKS = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=48,
              num_key_value_heads=4, head_dim=32)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
LATENT = dict(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_group=2,
              topk_group=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
              moe_intermediate_size=128)


def written(at: Path, config: Any, change: Callable[[dict[str, Tensor]], None], said: dict[str, Any]) -> Path:
    """A checkpoint with other tensors, and what its config says of them."""
    from safetensors.torch import load_file, save_file
    parity.seed()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(at)
    tensors = load_file(at / "model.safetensors")
    change(tensors)
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(text | {"quantization_config": said} if said else text))
    return at


def in_blocks(tensors: dict[str, Tensor]) -> None:
    """By transformers' own arithmetic."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    how = types.SimpleNamespace(quantization_config=types.SimpleNamespace(weight_block_size=[128, 128], scale_fmt=""))
    for name in [n for n in tensors if "proj" in n.split(".")[-2] and not any(d % 128 for d in tensors[n].shape)]:
        tensors.update(Fp8Quantize(how).convert({name: tensors.pop(name)}))


def as_mxfp4(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, fan_in, fan_out = tensors.pop(name).shape
        form = experts, fan_out, fan_in // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*form, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, form, dtype=torch.uint8)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
       "modules_to_not_convert": ["lm_head"]}
PUBLISHED: dict[str, tuple[Callable[[], Any], Callable[..., None], dict[str, Any]]] = {
    "fp8": (lambda: transformers.LlamaConfig(**BLOCKS), in_blocks, FP8),
    "fp8-experts": (lambda: transformers.Qwen3MoeConfig(**BLOCKS, moe_intermediate_size=128, num_experts=4,
                                                        num_experts_per_tok=2), in_blocks, FP8),
    "fp8-latent": (lambda: transformers.DeepseekV3Config(**BLOCKS | LATENT), in_blocks, FP8),
    "mxfp4": (lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), as_mxfp4,
              {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}),
    "nf4-experts": (lambda: transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4,
                                                        num_experts_per_tok=2), lambda tensors: None, {}),
    "nf4-latent": (lambda: transformers.DeepseekV3Config(**BLOCKS | LATENT), lambda tensors: None, {})}


def in_nf4(w: Tensor) -> Tensor:
    """A stack of experts as bitsandbytes makes each of them of its codes."""
    four = bnb.functional
    return torch.stack([four.dequantize_4bit(*four.quantize_4bit(e, blocksize=64, quant_type="nf4")) for e in w])


def plain_of(form: str, at: Path) -> nn.Module:
    """The model that a checkpoint of PUBLISHED is, by its package's own code."""
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, at, dtype="auto", device_map="cpu")
    if form in ("nf4-experts", "nf4-latent"):
        model = load(quantization_config=FORMATS["nf4-double"]())
        for name, p in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                p.data = in_nf4(p.data)
                p.requires_grad_(False)
        return model
    config = transformers.Mxfp4Config if form == "mxfp4" else transformers.FineGrainedFP8Config
    return load(quantization_config=config(dequantize=True))


@pytest.mark.parametrize(("form", "how", "home"), [(f, k, h) for f in PUBLISHED for k in ("replay", "saved")
                         for h in ("ram", "vram", "disk", "disk+weights")] if parity.FULL else [
    ("fp8", "replay", "disk+weights"), ("fp8-experts", "saved", "ram"), ("mxfp4", "replay", "ram"),
    ("mxfp4", "saved", "vram"), ("nf4-experts", "saved", "disk+weights")])
def test_a_published_base_kept_as_codes_trains_to_the_bits_of_its_16_bit_model(form: str, how: str, home: str,
                                                                               tmp_path: Path,
                                                                               monkeypatch: pytest.MonkeyPatch
                                                                               ) -> None:
    make, change, said = PUBLISHED[form]
    at = written(tmp_path / "published", make(), change, said)
    adapter = peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False)
    plain = plain_of(form, at)
    parity.seed()
    wanted = trained(peft.get_peft_model(plain, adapter).train())
    parity.seed()
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, at, base=form.partition("-")[0], adapter=adapter,
                               device="cpu", compute="eager", nvme=str(tmp_path) if "disk" in home else None,
                               plan={"activations": how, "slots": 2, "homes": home}).train()
    coded = [p for p in model.parameters() if type(p).__name__ == "Coded"]
    assert len(coded) == {"fp8": 14, "fp8-experts": 12, "fp8-latent": 16, "mxfp4": 4, "nf4-experts": 4,
                          "nf4-latent": 2}[form] and not any(p.requires_grad for p in coded)
    made: list[Any] = []
    own = frames.Expansions.of
    monkeypatch.setattr(frames.Expansions, "of", lambda self, rt, whole: made.append(whole) or own(self, rt, whole))
    assert_same(trained(model), wanted)
    assert bool(made) == (how == "saved"), "else the device would keep all that the codes stand for"


def test_a_matrix_that_ends_within_a_block_is_expanded_as_it_is_read(tmp_path: Path) -> None:
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows, and five rows of scales."""
    name, wanted = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", []

    def change(tensors: dict[str, Tensor]) -> None:
        codes = torch.randn(160, 128).to(torch.float8_e4m3fn)
        scales = torch.rand(2, 1)
        wanted.append((codes.float() * torch.cat((scales[:1].expand(128, -1), scales[1:].expand(32, -1)))).bfloat16())
        in_blocks(tensors)
        tensors.update({name: codes, f"{name}_scale_inv": scales})

    at = written(tmp_path / "fp8", transformers.DeepseekV3Config(**BLOCKS | LATENT), change, FP8)
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, at, base="fp8", device="cpu", compute="eager")
    assert torch.equal(model.get_parameter(name), wanted[0])


def test_saved_codes_are_read_again_by_transformers(tmp_path: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    for form in ("fp8", "mxfp4"):
        make, change, said = PUBLISHED[form]
        at = written(tmp_path / form, make(), change, said)
        model = mt.from_pretrained(transformers.AutoModelForCausalLM, at, base=form, device="cpu", compute="eager")
        with pytest.raises(mt.MegatrainError, match=r"mt\.save"):
            model.save_pretrained(tmp_path / "theirs")
        mt.save(model, None, tmp_path / "ours")
        assert_same_state(load(tmp_path / "ours", dtype="auto").state_dict(), load(at, dtype="auto").state_dict())


def test_experts_in_nf4_are_saved_copied_and_given_back(tmp_path: Path) -> None:
    model = published("nf4-experts", tmp_path / "at", compute="eager", plan={"experts": 3, "slots": 2})
    assert sum(type(p).__name__ == "Coded" for p in copy.deepcopy(model).parameters()) == 4
    losses(model, opt := adamw(model), 0, 1)
    mt.save(model, opt, tmp_path / "saved")
    wanted = losses(model, opt, 2, 3)
    again = published("nf4-experts", tmp_path / "again", compute="eager", plan={"experts": 2, "slots": 2})
    with torch.no_grad():
        for p in again.parameters():
            if type(p).__name__ == "Coded":
                p.codes.zero_()
                p.scales.zero_()
    mt.load(again, opt := adamw(again), tmp_path / "saved")
    assert_same(losses(again, opt, 2, 3), wanted)
    mt.unstream(again)
    assert sum(type(p).__name__ == "Coded" for p in again.parameters()) == 4
    assert_same(trained(again, 1), trained(model, 1))


@pytest.mark.parametrize("base_form", ["nf4", "int8", "fp8"])
def test_a_base_made_while_it_is_read_is_what_its_library_makes(base_form: str, tmp_path: Path) -> None:
    at = written(tmp_path / "bf16", transformers.LlamaConfig(**BLOCKS), lambda tensors: None, {})
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, at, base=base_form, device="cpu", compute="eager")
    if base_form == "fp8":
        found = {n: t for n, t in model.state_dict().items() if type(t).__name__ == "Coded"}
        assert len(found) == 14
        other = mt.from_pretrained(transformers.AutoModelForCausalLM,
                                   written(tmp_path / "fp8", transformers.LlamaConfig(**BLOCKS), in_blocks, FP8),
                                   base="fp8", device="cpu", compute="eager").state_dict()
        assert all(torch.equal(t.codes.view(torch.uint8), other[n].codes.view(torch.uint8))
                   and torch.equal(t.scales, other[n].scales) for n, t in found.items())
        return
    config = four_bits("nf4", bnb_4bit_use_double_quant=True) if base_form == "nf4" else FORMATS["int8"]()
    plain = transformers.AutoModelForCausalLM.from_pretrained(at, quantization_config=config, dtype="auto")
    assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, group, size", [(1, 64, 1.0), (127, 64, 1.0), (4096 + 33, 4096, 1e4), (640, 32, 1e-39), (320, 64, 0.0)])
def test_our_nf4_codes_are_the_packages(dtype: torch.dtype, n: int, group: int, size: float) -> None:
    numbers = bnb.functional.get_4bit_type("nf4", device="cpu")
    parity.seed()
    w = torch.randn(n) * size
    if n > 300:                                  # halves between numbers, their neighbours, and what is no number
        halves = (numbers[:-1] + numbers[1:]) / 2
        w[64:79], w[79:94], w[94], w[128], w[160] = halves, halves.nextafter(torch.tensor(2.0)), 1.0, math.nan, -math.inf
    codes, state = bnb.functional.quantize_4bit(w.to(dtype), blocksize=group, quant_type="nf4")
    own, scales = ops.nf4_codes(w.to(dtype), group)
    assert torch.equal(own, codes.flatten())
    torch.testing.assert_close(scales, state.absmax, rtol=0, atol=0, equal_nan=True)


# ---- run by templates ------------------------------------------------------------------------------

def layers_of(model: nn.Module) -> list[Any]:
    return [w for w in next(model.parameters())._mt_runtime.windows if "layers." in w.name]


def published(form: str, at: Path, **how: Any) -> nn.Module:
    make, change, said = PUBLISHED[form]
    parity.seed()
    adapter = peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False)
    return mt.from_pretrained(transformers.AutoModelForCausalLM, written(at, make(), change, said), adapter=adapter,
                              base=form.partition("-")[0], device=DEVICE, **how).train()


def fused(form: str, folder: Callable[[str], Path], at: Path, compute: str = "fused") -> nn.Module:
    """A streamed model with a base of this form."""
    if form in PUBLISHED:
        return published(form, at, compute=compute)
    return mt.stream(with_adapter(base(folder("llama"), form)), DEVICE, compute=compute)


EXPANDED = [f for f in (*FORMATS, *PUBLISHED) if not f.startswith("torchao")]


@pytest.mark.parametrize("form", EXPANDED if parity.FULL else ["nf4-double", "fp4", "int8", "mxfp4"])
def test_weights_are_made_of_codes_to_their_packages_bits(form: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = fused(form, folder, tmp_path / "published")
    assert layers_of(model)
    for window in layers_of(model):
        if form.startswith("int8") and DEVICE != "cpu":
            assert "rounds activations to 8 bits on a GPU" in window.unfit
            continue
        made, bound = window.fused.exact(window.fused.names), window.bind_leaves()
        assert window.wholes
        for whole in window.wholes:
            name = next(n for n, r in window.fused.records.items() if r is whole.records[0])
            wanted = whole.format.dense(bound[whole.records[0]], torch.bfloat16)
            for found in (made[name], made.joint((name,)), made.joint((name, name))[:wanted.shape[0]]):
                assert found.dtype == torch.bfloat16 and torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def rounded_only(found: list[Tensor], wanted: list[Tensor], routes: bool) -> None:
    """The first step's loss and gradients, in bf16: test_lora.py says how far roundings take them. routes: and a token's
    router may choose another of two experts that are alike to it."""
    assert float((found[0] - wanted[0]).abs()) <= 1e-2 * float(wanted[0])
    off = [float((a - b).norm() / b.norm()) for a, b in zip(found[1:], wanted[1:], strict=True) if b.norm()]
    assert max(off) <= (0.6 if routes else 0.2) and sorted(off)[len(off) // 2] <= (0.15 if routes else 0.05), off


@pytest.mark.parametrize("form", EXPANDED if parity.FULL else ["nf4-double"])
def test_templates_run_over_codes(form: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = fused(form, folder, tmp_path / "published")
    found = trained(model, 1)
    codes = {w.code for w in layers_of(model)}
    if form.startswith("int8") and DEVICE != "cpu":
        assert all("rounds activations" in code for code in codes)
        return
    assert codes == {"template"}, codes
    rounded_only(found, trained(fused(form, folder, tmp_path / "again", "eager"), 1),
                 form == "mxfp4" or form.endswith(("-experts", "-latent")))
    assert "template" in str(mt.explain(model))


def test_a_weight_that_is_not_its_packages_is_found_out(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    """One row is off by 2 %: less than outputs and gradients would tell."""
    own = ops.expand_codes_

    def off(out: Tensor, *args: Any, **kw: Any) -> None:
        own(out, *args, **kw)
        out[:1] *= 1.02

    monkeypatch.setattr(ops, "expand_codes_", off)
    model = fused("nf4-double", folder, Path())
    trained(model, 1)
    for window in layers_of(model):
        assert "stand for other numbers than bitsandbytes 4 bits's own code makes" in window.code


def test_what_templates_do_not_run_over_says_so(folder: Callable[[str], Path]) -> None:
    model = fused("torchao-int8", folder, Path())
    trained(model, 1)
    assert {w.code for w in layers_of(model)} == {"its own (its weights are codes: torchao 8 bits)"}
    wide = with_adapter(base(folder("llama"), "nf4"))
    wide.base_model.model.model.layers[0].self_attn.o_proj.base_layer.compute_dtype = torch.float32
    own = wide.base_model.model.model.layers[1].mlp.up_proj.base_layer
    own.forward = lambda x, forward=own.forward: forward(x) * 2
    trained(mt.stream(wide, DEVICE, compute="fused"), 1)
    first, second = (w.code for w in layers_of(wide))
    assert "self_attn.o_proj.base_layer: it computes in torch.float32, not in torch.bfloat16" in first
    assert "mlp.up_proj.base_layer: it is a Linear4bit, not bitsandbytes's Linear4bit as it came" in second


def test_a_base_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    cls, plain = transformers.AutoModelForCausalLM, tmp_path / "bf16"
    written(plain, transformers.LlamaConfig(**BLOCKS), lambda tensors: None, {})
    there = written(tmp_path / "fp8", transformers.LlamaConfig(**BLOCKS), in_blocks, FP8)
    small = written(tmp_path / "small", transformers.LlamaConfig(**SIZES), lambda tensors: None, {})
    for at, asked, why in ((small, "fp8", "no weight of .* is kept as codes"),
                           (plain, "int4", "use 'nf4', 'int8', 'fp8' or 'mxfp4'"), (plain, "mxfp4", "is not; it is kept"),
                           (there, "nf4", r"is quantised already \(fp8\); base='fp8' keeps it")):
        with pytest.raises(mt.MegatrainError, match=why):
            mt.from_pretrained(cls, at, base=asked, device="cpu")


@parity.LONG
@pytest.mark.parametrize("base_form", ["nf4", "int8", "fp8"])
def test_of_16_bit_weights_a_few_are_in_memory_at_a_time(base_form: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=64,
                                      num_attention_heads=16)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "bf16", base=base_form, device="cpu")
    del model                                # what is imported, and compiled, was
    gc.collect()

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    before, most, over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.003):
            most[0] = max(most[0], anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    model = mt.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "bf16", base=base_form, device="cpu",
                               compute="eager", plan={"slots": 2})
    over.set()
    watching.join()
    rt = next(model.parameters())._mt_runtime
    codes = sum(rt.core.hi_bytes(unit) for unit in range(len(rt.units))) + sum(s.nbytes for s in rt.ring.slots)
    weight = 2 * 1024 * 4096
    assert most[0] - before < codes + 12 * weight, f"{(most[0] - before - codes) / weight:.1f} weights at a time"
