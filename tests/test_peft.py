"""PEFT's methods beside LoRA: each trains a streamed model to plain torch's bits, by the layers' own code.

Methods that learn a prefix hand every layer keys and values in its cache; others put their weights into modules,
in front of embeddings, or behind attention.
"""
from __future__ import annotations

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


def test_adapters_on_parameters_of_experts_are_refused_by_name() -> None:
    """PEFT puts them together in each forward, in the place of the streamed parameter; "all" of the command line names
    linear layers instead."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from megatrain_torch.commands.models import adapted
    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
                           num_key_value_heads=2, num_local_experts=4)
    every = peft.get_peft_model(MixtralForCausalLM(config), peft.LoraConfig(r=4, target_modules="all-linear"))
    named = r"target_modules=\['k_proj', 'o_proj', 'q_proj', 'v_proj'\], on the command line targets=k_proj,"
    with pytest.raises(mt.MegatrainError, match=rf"layers.0.mlp.gate.*all-linear.*{named}"):
        mt.stream(every, "cpu")
    model = mt.stream(adapted(MixtralForCausalLM(config), "r=4,targets=all", 0), "cpu")
    trained = {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj"}
    hf_loss(model, text(0)).backward()


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
