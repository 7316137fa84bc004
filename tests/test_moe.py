"""Mixtures of experts run by templates: as test_fused.py, and what is theirs alone.

A router's choice is not continuous: where two experts are alike, rounding decides. In fp32 and with few experts
that does not happen in these tests; in bf16 a trial follows the choice of the module's own code.
"""
from __future__ import annotations

import copy
from typing import Any

import fusing
import parity
import pytest
import torch
import zoo
from fusing import KEEPS, all_fused, codes, fused, grads_agree, lm, none_fused, padded, stream
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.fused.templates import moe, parts, weights
from megatrain_torch.fused.templates.attention import Attention

SLIDING = dict(sliding_window=6)             # of rows of 12 tokens
FOUR = dict(num_experts=4, num_experts_per_tok=2)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
THIN = dict(**FOUR, moe_intermediate_size=16, decoder_sparse_step=1)
SIGMOID = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
               n_shared_experts=1, first_k_dense_replace=1, head_dim=8, routed_scaling_factor=2.5)
GROUPS = {**SIGMOID, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT = {**GROUPS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16}
FAMILIES = {
    "mixtral": lm("mixtral", **LOCAL, sliding_window=None),
    "qwen2_moe": lm("qwen2_moe", **THIN, shared_expert_intermediate_size=32),
    "qwen3_moe": lm("qwen3_moe", **THIN, head_dim=8),
    "qwen3_moe_normalised": lm("qwen3_moe", **THIN, head_dim=8, norm_topk_prob=True),
    "olmoe": lm("olmoe", **FOUR),
    "gpt_oss": lm("gpt_oss", **LOCAL, head_dim=8, **SLIDING,
                  rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "granitemoe": lm("granitemoe", **LOCAL, residual_multiplier=0.5),
    "granitemoeshared": lm("granitemoeshared", **LOCAL, shared_intermediate_size=48, residual_multiplier=0.5),
    "flex_olmo": lm("flex_olmo", **FOUR),
    "dots1": lm("dots1", **SIGMOID),
    "glm4_moe": lm("glm4_moe", **SIGMOID),
    "minimax_m2": lm("minimax_m2", **LOCAL, head_dim=8),
    "hy_v3": lm("hy_v3", **LOCAL, moe_intermediate_size=16, head_dim=8, first_k_dense_replace=1),
    "deepseek_v3": lm("deepseek_v3", **LATENT),
    # Queries at once, halves of a head turned, angles and scale for long rows.
    "deepseek_v3_otherwise": lm("deepseek_v3", **{**LATENT, "q_lora_rank": None}, rope_interleave=False,
                                attn_implementation="eager", rope_parameters=YARN),
}
# Not in every release of transformers.
NEWER = {
    "exaone_moe": lm("exaone_moe", **{**SIGMOID, **FOUR}, **SLIDING),
    "solar_open": lm("solar_open", **SIGMOID),
    "mellum": lm("mellum", **THIN, head_dim=8),
    "granitemoe_swa": lm("granitemoe_swa", **LOCAL, **SLIDING),
    "glm4_moe_lite": lm("glm4_moe_lite", **LATENT),
    "groups of experts": lm("dots1", **GROUPS),
}
BATCHES = {"whole": zoo.text_unpadded, "padded": padded}


# ---------------------------------------------------------------- families

# A layer of theirs is compared with its template below; and other tests here train the last two's as a whole.
ELSEWHERE = {"mixtral", "flex_olmo", "qwen3_moe", "glm4_moe", "deepseek_v3_otherwise"}


@pytest.mark.parametrize("family, keep, batch", [
    pytest.param(*case, marks=parity.LONG if i % 2 or case[0] in ELSEWHERE else ())
    for i, case in enumerate(fusing.combinations(FAMILIES, BATCHES))])
def test_a_fused_mixture_of_experts_trains_as_plain_torch(family: str, keep: str, batch: str) -> None:
    fusing.same_as_plain(FAMILIES[family], BATCHES[batch], keep)


@pytest.mark.parametrize("family", [pytest.param(f, marks=parity.LONG if i else ()) for i, f in enumerate(NEWER)])
def test_so_does_a_newer_one(family: str) -> None:
    fusing.same_as_plain(NEWER[family], padded, "selective")


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_it_does_not_matter_how_transformers_computes_experts(how: str) -> None:
    run = fused(lm("qwen3_moe", **THIN, head_dim=8, experts_implementation=how), padded)
    all_fused(run.codes)
    fusing.agree(fusing.truth(FAMILIES["qwen3_moe"], padded), run)


def test_experts_that_take_the_place_of_patched_ones_are_looked_at() -> None:
    model = stream(FAMILIES["mixtral"]())
    mlp = model.model.layers[1].mlp
    fresh, patched = copy.copy(mlp.experts), mlp.experts
    patched.forward = type(patched).forward.__get__(patched)
    model(**zoo.text_unpadded(0)).loss.backward()
    assert "forward of its own" in codes(model)["model.layers.1"]
    mlp.experts = fresh
    model(**zoo.text_unpadded(0)).loss.backward()
    all_fused(codes(model))


UNFIT = {
    "deepseek_v2": ("deepseek_v2", "called without (cos, sin)", {**LATENT, "n_group": None, "topk_group": None}),
    "phimoe": ("phimoe", "no RMSNorm", dict(**LOCAL)),
    "ernie4_5_moe": ("ernie4_5_moe", "no router", dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16)),
    "kolibri1": ("kolibri1", "its router", dict(**FOUR)),
    "jitter": ("mixtral", "draws random numbers", dict(**LOCAL, router_jitter_noise=0.1)),
    "clipped q, k and v": ("olmoe", "clips q, k and v", dict(**FOUR, clip_qkv=5.0)),
    "another gate": ("gpt_oss", "the gate of its experts", dict(**LOCAL, head_dim=8, swiglu_limit=3.0)),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_no_template_covers_says_why_and_trains(what: str) -> None:
    model_type, why, config = UNFIT[what]
    build = zoo.CASES[model_type].build if not config else lm(model_type, **config)
    parity.seed()
    model = stream(build())
    grads = fusing.grads_of(model, padded(0))
    found = codes(model)
    if "dense" in what or model_type in ("ernie4_5_moe", "kolibri1"):
        found.pop("model.layers.0")          # not a mixture
    none_fused(found, why)
    parity.seed()
    grads_agree(fusing.grads_of(build(), padded(0)), grads)


def test_router_logits_that_are_collected_keep_the_layers_own_code() -> None:
    """They leave the layer by a hook, and the auxiliary loss has a gradient through them."""
    build = lm("mixtral", **LOCAL, output_router_logits=True, router_aux_loss_coef=0.5)
    fusing.own_as_plain(build, padded, "hooks inside")


# ---------------------------------------------------------------- numbers

GRADCHECKED = ("mixtral", "qwen2_moe", "olmoe", "gpt_oss", "flex_olmo", "granitemoeshared", "deepseek_v3")


@pytest.mark.parametrize("family, keep", [*parity.turns(GRADCHECKED, KEEPS), *(
    pytest.param(family, keep, marks=parity.LONG) for family in ("dots1", "deepseek_v3_otherwise") for keep in KEEPS)])
def test_gradients_of_a_template_are_finite_differences(family: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fusing.gradcheck(FAMILIES[family], monkeypatch, keep)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_with_sinks_is_a_softmax_with_one_more_logit(groups: int, masked: bool) -> None:
    """The kernels' way, by their log-sum-exp, against products and softmax one by one, both in fp64."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    q, k, v, dout = draw(2, 9, 4, 8), draw(2, 9, 4 // groups, 8), draw(2, 9, 4 // groups, 8), draw(2, 9, 4, 8)
    sinks = 2 * draw(4)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(torch.ones(9, 9).triu(1) > 0, -1.7e38)
        mask[0, :, :3] = -1.7e38             # rows that see nothing but the sink
    kernel = Attention(0.3, causal=False, mask=mask)
    out, kept = kernel.forward(q, k, v, sinks)
    assert kept is not None, "no kernel took it"
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    wanted = kernel._torch(*[t.transpose(1, 2) for t in leaves[:3]], leaves[3]).transpose(1, 2)
    assert fusing.error(wanted, out) < 1e-14
    grads = torch.autograd.grad(wanted, leaves, dout)
    for a, b in zip(grads, kernel.backward(dout, q, k, v, out, kept, sinks)):
        assert fusing.error(a, b) < 1e-14


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=parity.LONG)])
def test_in_bf16_layers_are_fused_though_rounding_decides_some_choices(family: str) -> None:
    """32 experts, 4 of each token: in some token the choice is rounding's. The trial takes the choice of the layer's own
    code; training does not, so whole models are compared by their losses alone."""
    many = dict(num_experts=32, num_local_experts=32, num_experts_per_tok=4)
    build = lm(family, **{**THIN, **LOCAL, **many}, head_dim=8, sliding_window=6)

    def losses(streamed: bool) -> list[float]:
        model = build().bfloat16()
        model = stream(model, "selective") if streamed else model
        run = fusing.train(model, zoo.text, mt.AdamW if streamed else torch.optim.AdamW, steps=4)
        if streamed:
            all_fused(codes(model))
        return [float(loss) for loss in run.losses]

    for a, b in zip(losses(False), losses(True)):
        assert abs(a - b) < 0.05 * a


def test_fp32_norms_of_a_bf16_layer_keep_their_type() -> None:
    """As transformers loads GPT-OSS. In bf16 a weight of 1 would not see a change of 1e-3."""
    def build() -> nn.Module:
        model = FAMILIES["gpt_oss"]().bfloat16()
        for name, p in model.named_parameters():
            if "norm" in name:
                p.data = 1 + 1e-3 * torch.randn(p.shape, generator=zoo.generator(len(name)))
        return model

    own, model = build(), stream(build(), "selective")
    for m in (own, model):
        m(**padded(0)).loss.backward()
    all_fused(codes(model))
    for (name, p), q in zip(own.named_parameters(), model.parameters()):
        if "layernorm" in name:
            assert q.grad.dtype == torch.float32
            assert fusing.error(p.grad, q.grad) < 0.05, name     # of some twenty roundings to 8 bits


@pytest.mark.parametrize("style", ops.NORM_STYLES[1:])
def test_a_norm_with_weights_of_a_wider_type_is_that_of_fp64(style: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, dy, add = (torch.randn(2, 5, 32, generator=g).bfloat16() for _ in range(3))
    layer = nn.ModuleDict({"norm": nn.RMSNorm(32, eps=1e-6)})
    w, norm = torch.randn(32, generator=g), parts.Norm(layer, "norm")
    grads = weights.Grads(weights.Weights({"norm.weight": w}), ["norm.weight"])
    norm.style = style
    y, rstd = norm.forward(x, grads.w)
    dx, again = norm.backward(dy, x, rstd, grads, add, rebuild=True)
    leaves = [x.double().requires_grad_(), w.double().requires_grad_()]
    wanted = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-6) * (
        leaves[1] + (style == ops.ONE_PLUS))
    exact = torch.autograd.grad(wanted, leaves, dy.double())
    assert y.dtype == dx.dtype == torch.bfloat16 and torch.equal(y, again)
    assert fusing.error(wanted.detach(), y) < 2**-8 and fusing.error(exact[0] + add.double(), dx) < 2**-8
    assert fusing.error(exact[1], grads["norm.weight"]) < 1e-6


# ---------------------------------------------------------------- routing

@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 300), st.randoms())
def test_sorted_rows_are_each_choice_once_by_expert(tokens: int, k: int, count: int, random: Any) -> None:
    index = torch.tensor([random.sample(range(count), k) for _ in range(tokens)])
    rows = moe.sort_rows(index, count)
    assert torch.equal(rows.expert.long(), index.flatten()[rows.order])
    assert torch.equal(rows.token, rows.order // k)
    assert torch.equal(rows.order[rows.place], torch.arange(tokens * k))
    ends = torch.bincount(index.flatten(), minlength=count).cumsum(0)
    assert torch.equal(rows.offsets.long(), ends) and rows.offsets.dtype == torch.int32
    same = rows.expert[1:] == rows.expert[:-1]
    assert bool((rows.order[1:] > rows.order[:-1])[same].all()), "rows of an expert are not in the order of tokens"


def chosen(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The experts that each router of an ordinary model chooses."""
    seen: list[Tensor] = []
    handles = [m.register_forward_hook(lambda m, args, out: seen.append(out[2]))
               for m in model.modules() if type(m).__name__.endswith("Router")]
    with torch.no_grad():
        model(**batch)
    for h in handles:
        h.remove()
    return seen


@pytest.mark.parametrize("family, keep", parity.turns(["gpt_oss", "qwen3_moe"], KEEPS))
def test_an_expert_that_nobody_chooses_gets_a_zero_gradient_and_the_others_theirs(family: str, keep: str) -> None:
    def build() -> nn.Module:
        """Experts 0 and 2 win everywhere, 1 and 3 never."""
        model = FAMILIES[family]()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("router.bias"):
                    p.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
                if name.endswith("gate.weight"):
                    p[1].copy_(-p[0])        # the one of a pair that is negative is not chosen
                    p[3].copy_(-p[2])
                    p.mul_(30.0)
        return model

    own = build()
    own(**padded(0)).loss.backward()
    model = stream(build(), keep)
    model(**padded(0)).loss.backward()
    all_fused(codes(model))
    for (name, p), q in zip(own.named_parameters(), model.parameters()):
        assert fusing.error(p.grad, q.grad) < fusing.TOLERANCE, name
        if "experts." in name and family == "gpt_oss":
            for e in (0, 2):
                assert q.grad[e].abs().max() > 0, f"{name}: expert {e} is chosen and has no gradient"
            for e in (1, 3):
                assert torch.equal(q.grad[e], torch.zeros_like(q.grad[e])), f"{name}: expert {e} has a gradient"


def test_one_expert_for_all_and_as_many_as_there_are() -> None:
    for k in (1, 4):
        build = lm("qwen3_moe", **{**THIN, "num_experts_per_tok": k}, head_dim=8)
        fusing.same_as_plain(build, padded, "replay", steps=1)


def test_a_correction_of_the_choice_is_followed_as_it_changes() -> None:
    def grads(model: nn.Module) -> dict[str, Tensor | None]:
        found = {}
        for step, favoured in enumerate([0, 3]):
            for name, b in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    b.copy_(torch.eye(4)[favoured] * 2)
            model.zero_grad()
            model(**padded(0)).loss.backward()
            found |= {f"{step} {n}": parity.frozen(p.grad) for n, p in model.named_parameters()}
        return found

    model = stream(FAMILIES["glm4_moe"]())
    wanted = grads(FAMILIES["glm4_moe"]())
    grads_agree(wanted, grads(model))
    all_fused(codes(model))
    name = "model.layers.1.mlp.experts.down_proj"
    assert wanted[f"0 {name}"][0].abs().max() > 0 and wanted[f"1 {name}"][3].abs().max() > 0


def moved(model: nn.Module, way: str) -> None:
    """As an auxiliary-loss-free balance does after each forward; here so far that every choice would be another."""
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values = torch.tensor([5.0, -5.0, 5.0, -5.0])
            if way == "in place":
                b.add_(values)
            else:
                b.data.add_(values)


def grads_moved(model: nn.Module, way: str) -> list[Tensor]:
    model.train()
    loss = model(**padded(0)).loss
    moved(model, way)
    loss.backward()
    return [parity.frozen(p.grad) for p in model.parameters()]


# By .data is the harder way, since no version counts it.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute, keep, way", [
    pytest.param(compute, keep, way, marks=() if keep in ("saved", "replay+host") and way == "by .data" else parity.LONG)
    for compute in ("fused", "eager") for keep in ("saved", "attention", "replay", "linked", "replay+host")
    for way in ("in place", "by .data")])
def test_the_choice_of_the_forward_counts(compute: str, keep: str, way: str) -> None:
    if compute == "eager" and keep in ("attention", "linked"):
        pytest.skip("templates alone keep that")
    plain = FAMILIES["glm4_moe"]()
    model = mt.stream(copy.deepcopy(plain), device="cpu", compute=compute, plan={"activations": keep})
    wanted, found = grads_moved(plain, way), grads_moved(model, way)
    if compute == "fused":
        all_fused(codes(model))
    for (name, _), a, b in zip(plain.named_parameters(), wanted, found):
        assert torch.equal(a, b) if compute == "eager" else fusing.error(a, b) < fusing.TOLERANCE, name


def test_a_router_is_what_its_code_says() -> None:
    facts, act, _, shared = fusing.settings_of(FAMILIES["glm4_moe"])[1:5]
    assert facts.sigmoid and facts.normalised and facts.factor == 2.5 and act == shared == 0
    assert not fusing.settings_of(FAMILIES["qwen3_moe"])[1].sigmoid and fusing.settings_of(FAMILIES["gpt_oss"])[3]


def test_a_routers_fp32_weights_in_a_bf16_layer_make_its_logits_fp32() -> None:
    def build() -> nn.Module:
        model = FAMILIES["dots1"]().bfloat16()
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p.data = p.data.float()
        return model

    assert fusing.settings_of(build)[1].wide


def test_buffers_and_groups_that_a_softmax_router_does_not_use_choose_no_experts() -> None:
    def build() -> nn.Module:
        model = FAMILIES["qwen3_moe"]()
        for layer in model.model.layers:
            layer.mlp.register_buffer("counts", torch.tensor([9.0, 0.0, 0.0, 0.0]))
            layer.mlp.gate.num_group, layer.mlp.gate.topk_group = 2, 1
        return model

    fusing.same_as_plain(build, padded, "replay", steps=1)


# ---------------------------------------------------------------- uses

FROZEN = {
    "experts": ("experts.",), "routers": ("gate.weight",), "all but routers": ("self_attn", "norm", "experts"),
    "down_proj": ("down_proj",), "shared experts": ("shared_expert.",),
}


@pytest.mark.parametrize("what", ["routers", "experts", *(pytest.param(w, marks=parity.LONG) for w in (
    "all but routers", "down_proj", "shared experts"))])
def test_frozen_parts_get_no_gradient_and_the_others_theirs(what: str) -> None:
    def build() -> nn.Module:
        model = FAMILIES["qwen2_moe"]()
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in FROZEN[what]))
        return model

    fusing.same_as_plain(build, padded, "selective")


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "flex_olmo"])
def test_a_second_backward_gives_the_same_again(family: str) -> None:
    fusing.second_backward(FAMILIES[family])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "flex_olmo", "deepseek_v3", "deepseek_v3_otherwise"])
def test_what_is_kept_takes_the_bytes_that_are_reckoned_with(family: str) -> None:
    fusing.bytes_are_as_reckoned(FAMILIES[family]())


# ---------------------------------------------------------------- wrong templates

def from_the_wrong_rows(index: Tensor, count: int, right: Any = moe.sort_rows) -> moe.Rows:
    rows = right(index, count)
    return rows._replace(token=rows.token.roll(1))


def by_position(x: Tensor, dy: Tensor, offsets: Tensor, right: Any = ops.grouped_gemm_wgrad) -> Tensor:
    """An expert's gradient at its neighbour's place."""
    return right(x, dy, offsets).roll(1, 0)


WRONG = {
    "rows of other tokens": lambda: ("megatrain_torch.fused.templates.moe.sort_rows", from_the_wrong_rows),
    "gradients of other experts": lambda: ("megatrain_torch.ops.grouped_gemm_wgrad", by_position),
    "the router's gradient": lambda: ("megatrain_torch.fused.templates.moe.Router.backward",
                                      fusing.flipped(moe.Router, "backward", 0)[2]),
    "weights": lambda: ("megatrain_torch.fused.templates.moe.Router.weights",
                        fusing.flipped(moe.Router, "weights", 0)[2]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_template_is_refused_and_the_model_still_trains(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[what]())
    fusing.own_as_plain(FAMILIES["qwen3_moe"], padded, "is off from fp32 by")


def test_a_trial_takes_the_choice_of_the_layers_own_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one choice in ten that rounding decides would look like a wrong template."""
    model = stream(FAMILIES["qwen3_moe"]())
    monkeypatch.setattr(moe.Router, "_choice", lambda self, logits, correction: logits.topk(2, -1, False).indices)
    model(**padded(0)).loss.backward()
    all_fused(codes(model))
