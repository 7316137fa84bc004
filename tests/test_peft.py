"""PEFT's methods beside LoRA: each trains a streamed model to plain torch's bits, by the layers' own code.

Methods that learn a prefix hand every layer keys and values in its cache; others put their weights into modules,
in front of embeddings, or behind attention.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from situations import hf_loss, llama, text
from torch import Tensor, nn

import megatrain_torch as mt

peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

AT = {"target_modules": ["q_proj", "v_proj"]}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 5}),
    "prefix, projected": ("PrefixTuningConfig", {"num_virtual_tokens": 5, "prefix_projection": True,
                                                 "encoder_hidden_size": 16}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 5}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 5, "encoder_hidden_size": 16}),
    "LLaMA-Adapter": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {**AT, "r": 4}),
    "LoKr": ("LoKrConfig", {**AT, "r": 4}),
    "AdaLoRA": ("AdaLoraConfig", {**AT, "init_r": 4, "target_r": 2, "total_step": 10}),
    "OFT": ("OFTConfig", {**AT, "r": 0, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {**AT, "boft_block_size": 4}),
    "VeRA": ("VeraConfig", {"target_modules": ["q_proj"], "r": 4}),
    "HRA": ("HRAConfig", {"target_modules": ["q_proj"], "r": 4}),
    "FourierFT": ("FourierFTConfig", {"target_modules": ["q_proj"], "n_frequency": 20}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "tokens": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]}),
}


def trained(method: str, wrap: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and what was trained."""
    name, settings = METHODS[method]
    parity.seed()
    model: nn.Module = wrap(peft.get_peft_model(llama(), getattr(peft, name)(task_type="CAUSAL_LM", **settings)).train())
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    opt = torch.optim.AdamW(weights.values(), lr=1e-2, eps=1e-4)
    losses = [float(zoo.update(hf_loss(model, text(step)), opt)) for step in range(3)]
    return losses, {n: parity.frozen(p) for n, p in weights.items()}


# Every second one; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("method", [
    pytest.param(method, marks=parity.LONG if i % 2 else ()) for i, method in enumerate(METHODS)])
def test_a_method_trains_to_plain_torchs_bits(method: str) -> None:
    (losses, weights), (found, others) = trained(method, lambda m: m), trained(method, parity.stream_for_test)
    assert found == losses
    assert list(others) == list(weights)
    assert all(parity.same_bits(w, others[n]) for n, w in weights.items())


@pytest.mark.parametrize("method", ["prefix", "IA3", "norms", "tokens"])
def test_where_layers_may_be_fused_it_trains_as_plain_torch(method: str) -> None:
    """Prefixes wait in the cache of layers that a template would take otherwise. Losses within some roundings of fp32."""
    losses, weights = trained(method, lambda m: m)
    found, others = trained(method, lambda m: mt.stream(m, "cpu", compute="fused"))
    assert found == pytest.approx(losses, rel=1e-6)
    assert all(fusing.error(w, others[n]) < fusing.TRAINED for n, w in weights.items())


EXPERTS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
           "head_dim": 8, "num_experts_per_tok": 2}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3Moe", {"moe_intermediate_size": 16, "intermediate_size": 48, "num_experts": 4}),
    "GptOss": ("GptOss", {"intermediate_size": 32, "num_local_experts": 4})}        # whose matrices are transposed


def with_experts(kind: str, dtype: torch.dtype = torch.float32, **lora: Any) -> nn.Module:
    import transformers as tf
    name, sizes = MIXTURES[kind]
    parity.seed()
    config = getattr(tf, f"{name}Config")(**EXPERTS, **sizes, attn_implementation="eager")
    model = getattr(tf, f"{name}ForCausalLM")(config).to(dtype)
    lora = lora or {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **lora)).train()
    for n, p in model.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(p, std=0.05)                 # PEFT's begin with none, and so would A's gradients be
    return model


def of_experts(model: nn.Module) -> list[Tensor]:
    """Losses, gradients of adapters and what they have become, and a pass without them."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    opt, found = torch.optim.AdamW(trained.values(), lr=1e-2, eps=1e-4), []
    for step in range(2):
        loss = hf_loss(model, text(step))
        with torch.no_grad(), model.disable_adapter():
            found += [hf_loss(model, text(step)), loss.detach()]
        loss.backward()
        found += [p.grad.clone() for p in trained.values()]
        opt.step()
        opt.zero_grad()
    return found + [parity.frozen(p) for p in trained.values()]


@pytest.mark.parametrize("plan", [{"activations": "saved"}, {"activations": "replay", "slots": 2}, {"homes": "vram"},
                                  {"experts": 1}], ids=str)
@pytest.mark.parametrize("kind", MIXTURES)
def test_adapters_on_experts_own_parameters_train_to_pefts_bits(kind: str, plan: dict[str, Any]) -> None:
    import megatrain_torch as mt
    wanted, model = of_experts(with_experts(kind)), mt.stream(with_experts(kind), "cpu", plan=plan)
    assert all(map(parity.same_bits, of_experts(model), wanted))
    plain = mt.unstream(model)
    assert all("_activate_lora" not in vars(m) for m in plain.modules()), "PEFT's own again"
    with torch.no_grad():
        assert torch.isfinite(hf_loss(plain, text(3)))


def steps_of(model: nn.Module, opt: torch.optim.Optimizer, *steps: int) -> list[Tensor]:
    """Losses, gradients of adapters and what they have become."""
    trained, found = [p for p in model.parameters() if p.requires_grad], []
    for step in steps:
        loss = hf_loss(model, text(step))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in trained)]
        opt.step()
        opt.zero_grad()
    return found + [parity.frozen(p) for p in trained]


# A template rounds elsewhere than PEFT's code, and goes on with its own bits.
@pytest.mark.parametrize(("kind", "compute"), [
    pytest.param(kind, compute, marks=() if kind == "Qwen3Moe" else parity.LONG)
    for kind in MIXTURES for compute in ("eager", "fused")])
def test_adapters_on_experts_own_parameters_go_on_from_a_checkpoint(kind: str, compute: str, tmp_path: Path) -> None:
    def begun(compute: str = compute) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = with_experts(kind, target_parameters=["experts.gate_up_proj", "experts.down_proj"], use_rslora=True,
                             lora_alpha=3)
        if compute:
            model = mt.stream(model, "cpu", compute=compute, plan={"activations": "replay"})
        make = mt.AdamW if compute == "fused" else torch.optim.AdamW     # the last bits of the two differ
        return model, make([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)

    run = begun()
    first = steps_of(*run, 0, 1)
    mt.save(*run, tmp_path / "at")
    rest = steps_of(*run, 2, 3)
    if compute == "eager":
        plain = begun("")
        parity.assert_same(steps_of(*plain, 0, 1) + steps_of(*plain, 2, 3), first + rest)
    else:
        fusing.all_fused(fusing.codes(run[0]))
    again = begun()
    mt.load(*again, tmp_path / "at")
    parity.assert_same(rest, steps_of(*again, 2, 3))


@pytest.mark.parametrize("plan", [{"activations": "saved"}, {"activations": "replay", "slots": 2}], ids=str)
def test_activated_lora_trains_to_pefts_bits(plan: dict[str, Any]) -> None:
    """Hooks hand its layers where each row's adapters begin, and are gone when a layer runs again in backward."""
    def trained(wrap: Any) -> list[Tensor]:
        parity.seed()
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", alora_invocation_tokens=[7, 9], **AT)
        model, ids, found = wrap(peft.get_peft_model(llama(), config).train()), text(0)["input_ids"].clone(), []
        ids[:, 5:7] = torch.tensor([7, 9])
        ids[-1, 2:4] = ids[-1, 5:7]
        said = {"input_ids": ids, "labels": ids}
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):                               # in the first, B is zero, and so are A's gradients
            loss = hf_loss(model, said)
            with torch.no_grad(), model.disable_adapter():
                found += [hf_loss(model, said), loss.detach()]
            zoo.update(loss, opt)
        assert found[-1] < found[1]
        return found + [parity.frozen(p) for p in model.parameters() if p.requires_grad]

    assert all(map(parity.same_bits, trained(lambda m: mt.stream(m, "cpu", plan=plan)), trained(lambda m: m)))


@pytest.mark.parametrize("lora", [{"target_modules": "all-linear"}, {"target_parameters": ["experts.down_proj"]}], ids=str)
def test_what_peft_makes_of_all_linear_layers_trains_in_16_bits_too(lora: dict[str, Any]) -> None:
    import megatrain_torch as mt
    wanted = of_experts(with_experts("Mixtral", torch.bfloat16, **lora))
    model = mt.stream(with_experts("Mixtral", torch.bfloat16, **lora), "cpu")
    assert all(map(parity.same_bits, of_experts(model), wanted))


def test_all_of_the_command_line_is_the_linear_layers_and_experts_are_named() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    from megatrain_torch.commands.models import adapted
    for words, names in (("all", {"q_proj", "k_proj", "v_proj", "o_proj"}), ("down_proj,q_proj", {"experts", "q_proj"})):
        model = MixtralForCausalLM(MixtralConfig(**EXPERTS, intermediate_size=48, num_local_experts=4))
        model = mt.stream(adapted(model, f"r=4,targets={words}", 0), "cpu")
        assert {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad} == names
        hf_loss(model, text(0)).backward()
    for said in ("dropout=0.1", "dora=true"):
        with pytest.raises(mt.MegatrainError, match=f"{said}: PEFT has none for experts' parameters"):
            adapted(MixtralForCausalLM(MixtralConfig(**EXPERTS, intermediate_size=48)), f"r=4,targets=down_proj,{said}", 0)


def test_all_of_a_mixture_is_what_peft_does_not_take_for_its_experts() -> None:
    """Its shared experts' layers have the names that its experts' had."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from megatrain_torch.commands.models import adapted
    config = DeepseekV3Config(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, v_head_dim=8,
                              qk_nope_head_dim=8, qk_rope_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                              topk_group=1, first_k_dense_replace=1, vocab_size=512)
    model = mt.stream(adapted(DeepseekV3ForCausalLM(config), "r=4,targets=all", 0), "cpu")
    trained = {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= trained
    hf_loss(model, text(0)).backward()


def test_an_adapter_that_does_not_train_may_come_later_and_one_that_does_is_refused() -> None:
    """As TRL's `ref` of GRPO, which is compared with."""
    import megatrain_torch as mt

    def reference(model: nn.Module) -> Tensor:
        model.set_adapter("ref")
        with torch.no_grad():
            found = hf_loss(model, text(0))
        model.set_adapter("default")
        return found

    def made(wrap: Any) -> nn.Module:
        parity.seed()
        model = wrap(peft.get_peft_model(llama(), peft.LoraConfig(r=4, **AT)).train())
        model.add_adapter("ref", model.peft_config["default"])
        for n, p in model.named_parameters():
            if ".ref." in n:
                p.data.fill_(0.01)
        return model

    plain, model = made(lambda m: m), made(lambda m: mt.stream(m, "cpu"))
    assert parity.same_bits(reference(plain), reference(model)) and reference(model) != hf_loss(model, text(0))
    hf_loss(model, text(0)).backward()
    hf_loss(plain, text(0)).backward()
    own = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert own and all(parity.same_bits(own[n], p.grad) for n, p in model.named_parameters() if n in own)
    model.set_adapter("ref")
    with pytest.raises(mt.MegatrainError, match=r"lora_A.ref.weight' was put into the model after mt.stream"):
        hf_loss(model, text(0))


def test_what_was_put_in_later_is_refused_no_more_once_it_is_out_and_what_another_model_streams_always() -> None:
    model, other = (mt.stream(zoo.Chain(nn.Linear(8, 8), nn.Linear(8, 8)), "cpu") for _ in range(2))
    model.late = nn.Linear(8, 8).requires_grad_(False)
    want = model(torch.ones(2, 8))
    model.late.requires_grad_(True)
    with pytest.raises(mt.MegatrainError, match=r"'late.weight' was put into the model after mt.stream"):
        model(torch.ones(2, 8))
    del model.late
    assert torch.equal(want, model(torch.ones(2, 8)))
    model.other = other.requires_grad_(False)
    with pytest.raises(mt.MegatrainError, match=r"'other.layers.0.weight' was put into the model after mt.stream"):
        model(torch.ones(2, 8))
