"""Decoder layers run by templates: the same training as with the model's own code, and nothing where it cannot be.

Everything here is tiny, on the CPU device, in fp32 where not said; what is compared and how far: fusing.py.
"""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import fusing
import parity
import pytest
import test_moe
import torch
import zoo
from fusing import KEEPS, all_fused, codes, fused, grads_agree, lm, none_fused, padded, stream
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import ops
from megatrain_torch.fused.templates import attention_half, decoder
from megatrain_torch.fused.templates.decoder import GatedMLP

SLIDING = dict(sliding_window=6)             # of rows of 12 tokens
GEMMA = dict(head_dim=8, query_pre_attn_scalar=8, **SLIDING)
LATENT = dict(q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
FAMILIES = {
    "llama": lm("llama"),
    "llama_biases": lm("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama_tied": lm("llama", tie_word_embeddings=True),
    "llama_eager_attention": lm("llama", attn_implementation="eager"),
    "mistral": lm("mistral", **SLIDING),
    "qwen2": lm("qwen2"),
    "qwen3": lm("qwen3", head_dim=8),
    "phi3": lm("phi3"),
    "phi3_partial_rotary": lm("phi3", partial_rotary_factor=0.5),
    "gemma": lm("gemma", head_dim=8),
    "gemma2": lm("gemma2", attn_implementation="eager", **GEMMA),
    "gemma3": lm("gemma3_text", sliding_window_pattern=2, **GEMMA),
    "olmo2": lm("olmo2"),
    "olmo3": lm("olmo3", **SLIDING),
    "granite": lm("granite", embedding_multiplier=2.0, residual_multiplier=0.5),
    "smollm3": lm("smollm3", no_rope_layer_interval=2),
    "glm": lm("glm", head_dim=8),
    "glm4": lm("glm4", head_dim=8),
    "helium": lm("helium", head_dim=8),
    "exaone4": lm("exaone4", sliding_window_pattern=2, **SLIDING),
    "cwm": lm("cwm", **SLIDING),
    "ernie4_5": lm("ernie4_5"),
    "ministral": lm("ministral", head_dim=8, **SLIDING),
    "seed_oss": lm("seed_oss", attention_dropout=0.0, residual_dropout=0.0),
    "vaultgemma": lm("vaultgemma", attn_implementation="eager", **GEMMA),
    "youtu": lm("youtu", **LATENT, num_key_value_heads=4, tie_word_embeddings=False),
}
# Of the same structure as one above.
ALIKE = {
    "internlm3": lm("internlm3", head_dim=8),
    "iquestcoder": lm("iquestcoder"),
    "granite_swa": lm("granite_swa", **SLIDING),         # with attention sinks
    "minicpm3": lm("minicpm3", **LATENT, num_key_value_heads=4, scale_depth=0.8, dim_model_base=16),
}
LLAMA = FAMILIES["llama"]


def packed(step: int) -> dict[str, Tensor]:
    """Two texts in each row, told apart by their positions."""
    batch = zoo.text_unpadded(step)
    return {**batch, "position_ids": torch.cat((torch.arange(5), torch.arange(zoo.T - 5))).expand(zoo.B, -1)}


BATCHES = {"whole": zoo.text_unpadded, "padded": padded}


# ---------------------------------------------------------------- families

# Of test_masks.py, or another one's template with other numbers.
ELSEWHERE = {"mistral", "ministral", "vaultgemma"}


@pytest.mark.parametrize("family, keep, batch", [
    pytest.param(*case, marks=parity.LONG if i % 4 or case[0] in ELSEWHERE else ())
    for i, case in enumerate(fusing.combinations(FAMILIES, BATCHES))])
def test_a_fused_family_trains_as_plain_torch(family: str, keep: str, batch: str) -> None:
    fusing.same_as_plain(FAMILIES[family], BATCHES[batch], keep)


@parity.LONG
@pytest.mark.parametrize("family", ALIKE)
def test_so_does_one_of_the_same_structure(family: str) -> None:
    fusing.same_as_plain(ALIKE[family], padded, "selective")


# What does not fuse, and the words of the reason. A few carry structure that no template has (yet); Cohere's layers look
# like Llama's by their names, and are told by the trial alone.
UNFIT = {
    "cohere": "no template has its mean", "cohere2": "no template has its mean",
    "gpt_neox": "no RMSNorm", "nemotron": "no RMSNorm", "phi": "no RMSNorm", "stablelm": "no RMSNorm",
    "starcoder2": "no RMSNorm", "llama_eager": "attention drops out", "llama4_text": "no template covers",
    "lfm2": "no template covers", "jamba": "no template covers", "falcon_h1": "no template covers",
}


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(f, marks=parity.LONG) for f in (
    "llama", "qwen3", "gemma2", "mixtral", "qwen2_moe", "gpt_oss", "dots1", "deepseek_v3"))])
def test_layers_on_the_device_are_not_copied_to_the_host_to_be_fused(family: str) -> None:
    fusing.stays_on_the_device((FAMILIES | test_moe.FAMILIES)[family], "selective")


@pytest.mark.parametrize("keep", parity.turns(KEEPS))
def test_a_layer_frozen_for_another_pass_hands_over_the_same(keep: str) -> None:
    def grads(switched: bool) -> dict[str, Tensor | None]:
        model = stream(FAMILIES["llama"](), keep)
        part = model.model.layers[1]
        loss = zoo.model_loss(model, zoo.text(0))
        if switched:
            part.requires_grad_(False)
            (zoo.model_loss(model, zoo.text(1)) * 0).backward()
            part.requires_grad_(True)
        loss.backward()
        all_fused(codes(model))
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}

    plain, found = grads(False), grads(True)
    assert all(torch.equal(plain[n], g) for n, g in found.items())


# The first of each reason; all with MEGATRAIN_FULL.
@pytest.mark.parametrize("name", [pytest.param(name, marks=parity.LONG if why in [*UNFIT.values()][:i] else ())
                                  for i, (name, why) in enumerate(UNFIT.items())])
def test_an_architecture_without_a_template_says_why_and_runs_its_own_code(name: str) -> None:
    case = zoo.CASES[name]
    model = stream(case.build())
    case.loss(model, case.batch(0)).backward()
    none_fused(codes(model), UNFIT[name])


def test_an_mlp_that_names_no_activation_runs_its_own_code() -> None:
    """MiniMax M3 VL writes it out in its forward."""
    model = LLAMA()
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.forward = lambda x, m=layer.mlp: m.down_proj(torch.sigmoid(m.gate_proj(x)) * m.up_proj(x))
    model = stream(model)
    zoo.model_loss(model, zoo.text(0)).backward()
    none_fused(codes(model), "its activation")


# ---------------------------------------------------------------- numbers

@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(f, marks=parity.LONG) for f in ("llama", "olmo2"))])
def test_in_bf16_a_fused_layer_is_no_further_from_fp32_than_its_own_code(family: str) -> None:
    """Both round to 8 bits at other places. Over a whole model's gradients the distances to fp32 are alike: 0.7 to
    1.1 times was seen; 1.5 leaves room for another order of sums."""
    def grads(dtype: torch.dtype, streamed: bool) -> dict[str, Tensor]:
        model = FAMILIES[family]()
        model.load_state_dict({n: t.bfloat16() for n, t in model.state_dict().items()})       # fp32 knows no more
        model = stream(model.to(dtype), "selective") if streamed else model.to(dtype)
        model(**padded(0)).loss.backward()
        if streamed:
            all_fused(codes(model))
        return {n: parity.frozen(p.grad).double() for n, p in model.named_parameters()}

    exact, own, template = grads(torch.float32, False), grads(torch.bfloat16, False), grads(torch.bfloat16, True)

    def distance(other: dict[str, Tensor]) -> float:
        return sum(float((other[n] - t).norm() / t.norm()) for n, t in exact.items()) / len(exact)

    assert 0 < distance(template) <= 1.5 * distance(own)


GRADCHECKED = {"llama_biases": 0, "qwen3": 0, "gemma2": ops.ONE_PLUS, "olmo2": 0, "granite": 0, "glm4": 0,
               "phi3_partial_rotary": 0, "smollm3": 0}


@pytest.mark.parametrize("family, keep", parity.turns(list(GRADCHECKED), KEEPS))
def test_gradients_of_a_template_are_finite_differences(family: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fusing.gradcheck(FAMILIES[family], monkeypatch, keep, GRADCHECKED[family])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_what_is_kept_takes_the_bytes_that_are_reckoned_with(family: str) -> None:
    fusing.bytes_are_as_reckoned(FAMILIES[family]())


# ---------------------------------------------------------------- what is trained

def freeze(*parts: str, only: bool = False) -> Callable[[nn.Module], None]:
    """Parameters whose name holds one of `parts`; with `only`, all others."""
    def do(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if any(part in name for part in parts) != only:
                p.requires_grad_(False)
    return do


FROZEN = {
    "norms": freeze("norm"),
    "all but norms": freeze("norm", only=True),
    "a layer in the middle": freeze("layers.1."),
    "q alone of q, k and v": freeze("q_proj"),
    "up and down": freeze("up_proj", "down_proj"),
    "the layers": freeze("layers."),
}


@pytest.mark.parametrize("what, keep", parity.turns(list(FROZEN), ["saved", "replay"]))
def test_frozen_parts_get_no_gradient_and_the_others_theirs(what: str, keep: str) -> None:
    def build() -> nn.Module:
        model = FAMILIES["qwen3"]()
        FROZEN[what](model)
        return model

    fusing.same_as_plain(build, padded, keep)


def test_layers_before_the_first_trained_weight_run_their_own_code() -> None:
    def build() -> nn.Module:
        model = LLAMA()
        freeze("layers.2.", "lm_head", only=True)(model)
        return model

    run = fused(build, padded)
    assert run.codes["model.layers.2"] == "template"
    none_fused({n: c for n, c in run.codes.items() if n != "model.layers.2"}, "nothing needs a gradient")
    fusing.agree(fusing.plain(build, padded), run)


def test_parts_frozen_between_steps_are_followed() -> None:
    def grads(model: nn.Module) -> dict[str, Tensor | None]:
        found = {}
        for step, frozen in enumerate(["q_proj", "down_proj", ""]):
            for name, p in model.named_parameters():
                p.requires_grad_(not frozen or frozen not in name)
            model.zero_grad()
            model(**zoo.text(step)).loss.backward()
            found |= {f"step {step}, {n}": parity.frozen(p.grad) for n, p in model.named_parameters()}
        return found

    model = stream(LLAMA())
    grads_agree(grads(LLAMA()), grads(model))
    all_fused(codes(model))


# ---------------------------------------------------------------- uses of a layer

@pytest.mark.parametrize("keep", parity.turns(KEEPS[1:] + KEEPS[:1]))
def test_micro_batches_add_up(keep: str) -> None:
    fusing.same_as_plain(FAMILIES["llama_tied"], padded, keep, accumulate=3, steps=2)


@pytest.mark.parametrize("keep", parity.turns(KEEPS[2:] + KEEPS[:2]))
def test_two_slots_and_slow_queues_change_nothing(keep: str) -> None:
    once = fused(FAMILIES["qwen3"], padded, keep)
    for seed in range(3):
        again = fused(FAMILIES["qwen3"], padded, keep, engine=dict(delay_us=300, seed=seed))
        for name, t in once.weights.items():
            assert torch.equal(t, again.weights[name]), f"{name} depends on when copies run"


@pytest.mark.parametrize("keep", parity.turns(KEEPS))
def test_a_layer_called_twice_sums_its_gradients(keep: str) -> None:
    def build() -> nn.Module:
        model = LLAMA()
        model.model.layers[2] = model.model.layers[0]
        return model

    def uncached(step: int) -> dict[str, Any]:           # a cache would see one layer's keys twice
        return {**padded(step), "use_cache": False}

    fusing.same_as_plain(build, uncached, keep)


@pytest.mark.parametrize("keep", parity.turns(KEEPS[1:] + KEEPS[:1]))
def test_a_second_backward_gives_the_same_again(keep: str) -> None:
    fusing.second_backward(FAMILIES["olmo2"], keep)


def test_gradients_are_given_to_whom_asks_for_them() -> None:
    def grads(model: nn.Module) -> dict[str, Tensor]:
        wanted = {n: p for n, p in model.named_parameters() if "layers.1" in n}
        return dict(zip(wanted, torch.autograd.grad(model(**padded(0)).loss, list(wanted.values()))))

    model = stream(LLAMA())
    grads_agree(grads(LLAMA()), grads(model))
    all_fused(codes(model))


def test_an_input_changed_in_place_raises_as_in_torch() -> None:
    model = stream(LLAMA())
    model(**zoo.text(0)).loss.backward()     # tried by now

    def spoil(module: nn.Module, args: Any, out: Tensor) -> None:
        args[0].add_(1.0)

    model.model.layers[1].register_forward_hook(spoil)
    loss = model(**zoo.text(0)).loss
    all_fused(codes(model))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_update_between_forward_and_backward_raises() -> None:
    model = stream(LLAMA())
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    model(**zoo.text(0)).loss.backward()
    hidden = model.model.layers[0](model.model.embed_tokens(zoo.text(1)["input_ids"]), **fusing.rotation(model))
    opt.step()
    with pytest.raises(RuntimeError, match="0' were updated between forward and backward"):
        hidden.sum().backward()


def test_create_graph_is_refused() -> None:
    model = stream(LLAMA())
    loss = model(**zoo.text(0)).loss
    with pytest.raises(mt.MegatrainError, match="create_graph"):
        loss.backward(create_graph=True)


# ---------------------------------------------------------------- inputs

@parity.LONG
def test_texts_packed_into_one_row_do_not_see_each_other() -> None:
    for family in ("llama", "gemma3"):
        fusing.same_as_plain(FAMILIES[family], packed)


def test_embeddings_as_input_get_their_gradient() -> None:
    x = torch.randn(zoo.B, zoo.T, zoo.H, generator=zoo.generator(0))

    def grad(model: nn.Module) -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        model(inputs_embeds=leaf, labels=zoo.text(0)["labels"]).loss.backward()
        return {"x": leaf.grad}

    model = stream(LLAMA())
    grads_agree(grad(LLAMA()), grad(model))
    all_fused(codes(model))


@pytest.mark.parametrize("keep", ["saved", "replay"])
def test_an_input_that_is_not_dense_is_taken(keep: str) -> None:
    """Patches of images come as [B, H, S], transposed; of one row no reshape makes a copy."""
    def embedded(step: int) -> dict[str, Tensor]:
        x = torch.randn(1, zoo.H, zoo.T, generator=zoo.generator(step))
        return {"inputs_embeds": x.requires_grad_().transpose(1, 2), "labels": zoo.text_unpadded(step)["labels"][:1]}

    fusing.same_as_plain(LLAMA, embedded, keep)


def test_rows_too_short_to_try_a_template_on_run_its_own_code() -> None:
    def short(step: int) -> dict[str, Tensor]:
        return {n: t[:, :3] for n, t in zoo.text_unpadded(step).items()}

    model = stream(LLAMA())
    model(**short(0)).loss.backward()
    none_fused(codes(model), "fewer than 4 tokens")
    model(**zoo.text(0)).loss.backward()
    model(**short(0)).loss.backward()
    all_fused(codes(model))


@pytest.mark.parametrize("tokens", [1, 10])
@pytest.mark.parametrize("tried", [False, True])
def test_what_a_cache_holds_is_attended_to(tokens: int, tried: bool) -> None:
    """In training too, by the layers' own code (prefixes that are learnt come so), also once templates are in use."""
    ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module) -> Tensor:
        with torch.no_grad():
            cache = model(input_ids=ids[:, :-tokens], use_cache=True).past_key_values
        return model(input_ids=ids[:, -tokens:], past_key_values=cache).logits.square().mean()

    plain, model = LLAMA(), stream(LLAMA())
    if tried:
        model(input_ids=ids, use_cache=False).logits.mean().backward()
        all_fused(codes(model))
        model.zero_grad()
    right, found = loss(plain), loss(model)
    assert fusing.error(right.detach(), found.detach()) < fusing.TOLERANCE
    right.backward()
    found.backward()
    grads_agree(*({n: p.grad for n, p in m.named_parameters()} for m in (plain, model)))


def test_a_large_key_value_cache_in_training_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 12 tokens, keys and values of 2 heads of 8, three layers: 9 KiB."""
    monkeypatch.setattr(attention_half, "LARGE_CACHE", 9216)
    monkeypatch.setattr(attention_half, "_told", [])
    batch = zoo.text_unpadded(0)
    model = stream(LLAMA(), "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch, use_cache=False).loss.backward()
        with torch.no_grad():
            model(**batch, use_cache=True)
    with pytest.warns(UserWarning, match="key-value cache of 9.0 KiB.*use_cache=False") as told:
        for _ in range(2):
            model(**batch, use_cache=True).loss.backward()
    assert len([w for w in told if "key-value" in str(w.message)]) == 1
    monkeypatch.setattr(attention_half, "LARGE_CACHE", 9217)
    monkeypatch.setattr(attention_half, "_told", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch, use_cache=True).loss.backward()


@pytest.mark.parametrize("keep", ["saved", "replay"])
def test_a_key_value_cache_is_filled_once_and_cut_off_from_the_graph(keep: str) -> None:
    batch = zoo.text_unpadded(0)
    with torch.no_grad():
        wanted = LLAMA()(**batch, use_cache=True).past_key_values
    model = stream(LLAMA(), keep)
    out = model(**batch, use_cache=True)
    out.loss.backward(retain_graph=True)
    all_fused(codes(model))
    for found, own in zip(out.past_key_values.layers, wanted.layers):
        for a, b in ((own.keys, found.keys), (own.values, found.values)):
            assert fusing.error(a, b) < fusing.TOLERANCE
    with pytest.raises(mt.MegatrainError, match="key-value cache"):
        (out.loss + out.past_key_values.layers[1].keys.sum()).backward()


# ---------------------------------------------------------------- when the module's own code has to run

def test_hooks_inside_a_layer_keep_its_own_code_while_they_are_there() -> None:
    model, seen = stream(LLAMA()), []
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    model(**zoo.text(0)).loss.backward()
    found = codes(model)
    none_fused({"1": found.pop("model.layers.1")}, "hooks inside")
    all_fused(found)
    assert seen
    handle.remove()
    model(**zoo.text(0)).loss.backward()
    all_fused(codes(model))


def test_hooks_on_a_layer_itself_see_its_output() -> None:
    model, seen = stream(LLAMA()), []
    model.model.layers[1].register_forward_hook(lambda m, args, out: seen.append(out))
    model.model.layers[1].register_full_backward_hook(lambda m, dx, dy: seen.append(dx[0]))
    model(**zoo.text(0)).loss.backward()
    all_fused(codes(model))
    assert [t.shape for t in seen] == [(zoo.B, zoo.T, zoo.H)] * 2


@pytest.mark.parametrize("which", ["hidden_states", "attentions"])
def test_outputs_that_transformers_collects_are_right(which: str) -> None:
    def outputs(model: nn.Module) -> list[Tensor]:
        out = model(**zoo.text(1), **{f"output_{which}": True})
        out.loss.backward()
        return list(out[which])

    build = FAMILIES["llama_eager_attention"]
    model = stream(build())
    for a, b in zip(outputs(build()), outputs(model), strict=True):
        assert fusing.error(a, b) < fusing.TOLERANCE
    if which == "attentions":
        none_fused(codes(model), "hooks inside")
    else:
        all_fused(codes(model))
    model(**zoo.text(0)).loss.backward()     # its hooks stay, and collect nothing
    all_fused(codes(model))


def test_dropout_keeps_the_layers_own_code() -> None:
    fusing.own_as_plain(lm("llama", attention_dropout=0.1), padded, "drops out")


def test_autocast_to_the_weights_own_type_changes_nothing() -> None:
    """What Trainer(bf16=True) does to a model whose weights are bf16 already."""
    losses = []
    for cast in (False, True):
        torch.manual_seed(0)
        model = mt.stream(LLAMA().to(torch.bfloat16).train(), "cpu", compute="fused")
        ids = torch.arange(24).view(2, 12)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        lines = mt.explain(model).splitlines()[1:]
        assert all(line.endswith(("template", "fused with the loss")) for line in lines), lines
        losses.append((loss.item(), model.model.embed_tokens.weight.grad.clone()))
    assert losses[0][0] == losses[1][0] and torch.equal(losses[0][1], losses[1][1])


def test_a_module_that_widens_its_output_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autocast makes some norms do: what comes after would see another type."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    own = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: own(self, x).float())
    model = mt.stream(LLAMA().to(torch.bfloat16).train(), "cpu", compute="fused")
    norm = model.model.norm
    norm(torch.randn(2, 4, norm.weight.shape[0], dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    line = next(x for x in mt.explain(model).splitlines() if x.startswith("model.norm"))
    assert "its own (" in line, line


def test_autocast_keeps_the_layers_own_code() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    run = fused(LLAMA, padded, loss=loss, steps=1)
    none_fused(run.codes, "autocast is on")
    for name, t in fusing.plain(LLAMA, padded, loss=loss, steps=1).grads.items():
        assert torch.equal(t, run.grads[name]), name


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing_means_replay(when: str) -> None:
    model = LLAMA()
    if when == "before":
        model.gradient_checkpointing_enable()
    model = stream(model, "auto")
    if when == "after":
        model.gradient_checkpointing_enable()
    grads_agree(fusing.grads_of(LLAMA(), padded(0)), fusing.grads_of(model, padded(0)))
    all_fused(codes(model))
    assert "replay" in mt.explain(model)


# ---------------------------------------------------------------- around training

def test_evaluation_between_steps_and_generation_after_are_the_models_own() -> None:
    model = stream(LLAMA())
    opt = mt.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        zoo.update(model(**zoo.text(step)).loss, opt)
        with torch.no_grad():
            loss = model.eval()(**zoo.text(9)).loss
        assert torch.equal(loss, copy.deepcopy(model)(**zoo.text(9)).loss)
        model.train()
    all_fused(codes(model))
    fusing.generates_as_plain(model)
    model(**zoo.text(4)).loss.backward()
    all_fused(codes(model))


def test_compute_eager_has_the_bits_of_plain_torch() -> None:
    model = stream(LLAMA(), compute="eager")
    found, own = (fusing.grads_of(m, padded(0)) for m in (model, LLAMA()))
    assert set(codes(model).values()) == {"its own"}
    assert [n for n in own if not torch.equal(own[n], found[n])] == []


# ---------------------------------------------------------------- wrong templates

def rotated_the_other_way(*args: Any, inverse: bool = False, rope: Any = ops.rope, **kwargs: Any) -> None:
    rope(*args, inverse=False, **kwargs)


def gate_for_up(*args: Any, dgate: Tensor, dup: Tensor, glu: Any = ops.glu_backward, **kwargs: Any) -> None:
    glu(*args, dgate=dup, dup=dgate, **kwargs)


WRONG = {
    "a norm's forward": lambda: fusing.flipped(ops, "rms_norm", 0),
    "a norm's weight gradient": lambda: fusing.flipped(ops, "rms_norm_backward", 1),
    "the gate's backward": lambda: (ops, "glu_backward", gate_for_up),
    "the rotation's backward": lambda: (ops, "rope", rotated_the_other_way),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_template_is_refused_and_the_model_still_trains(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[what]())
    fusing.own_as_plain(FAMILIES["qwen3"], padded, "is off from fp32 by")


def test_a_layer_of_which_two_weights_are_one_parameter_says_which() -> None:
    model = LLAMA()
    attention = model.model.layers[0].self_attn
    attention.o_proj.weight = attention.q_proj.weight
    run = fused(lambda: copy.deepcopy(model), padded)
    assert "self_attn.q_proj.weight and self_attn.o_proj.weight are one parameter" in run.codes["model.layers.0"]
    fusing.agree(fusing.truth(lambda: copy.deepcopy(model), padded), run)


def test_a_template_that_fails_is_refused_and_the_model_still_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ops, "glu_backward", fail)
    fusing.own_as_plain(LLAMA, padded, "the template fails: no such kernel")


# ---- gate and up in tiles of rows: as without, but for the order in which weight gradients are summed ----

ROWS = 8                                     # of 24 tokens


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of so few rows; yields the rows of each forward and backward."""
    seen: list[int] = []
    monkeypatch.setattr(decoder, "TILE_BYTES", 0)
    monkeypatch.setattr(decoder, "LEAST_ROWS", ROWS)
    for name in ("_forward", "_backward"):
        own = getattr(GatedMLP, name)
        monkeypatch.setattr(GatedMLP, name, lambda self, *args, own=own: (seen.append(args[0].shape[0]), own(self, *args))[1])
    return seen


@pytest.mark.parametrize("family, keep", [
    ("llama_biases", "replay"), pytest.param("llama_biases", "selective", marks=parity.LONG), ("gemma2", "selective"),
    pytest.param("olmo2", "replay", marks=parity.LONG), ("olmo2", "attention"),
    *(pytest.param(*case, marks=parity.LONG) for case in (("granite", "selective"), ("phi3", "attention+host")))])
def test_a_layer_in_tiles_trains_as_plain_torch(family: str, keep: str, tiles: list[int]) -> None:
    """fusing.TOLERANCE: sums over 24 tokens in three parts, each rounded as torch rounds its own."""
    fusing.same_as_plain(FAMILIES[family], padded, keep)
    assert set(tiles[-30:]) == {ROWS}


def test_what_is_kept_whole_is_made_whole(tiles: list[int]) -> None:
    fusing.fused(FAMILIES["llama"], padded, "saved")
    assert ROWS not in tiles[-4:]


def test_in_bf16_tiles_are_no_further_from_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in fp32, rounded once: a gradient in tiles is as near as one product."""
    def grads(dtype: torch.dtype, keep: str) -> dict[str, Tensor]:
        parity.seed()
        model = FAMILIES["qwen2"]()
        model.load_state_dict({n: t.bfloat16() for n, t in model.state_dict().items()})
        model = fusing.stream(model.to(dtype), keep)
        model(**padded(0)).loss.backward()
        return {n: parity.frozen(p.grad).double() for n, p in model.named_parameters() if "mlp" in n}

    exact, whole = grads(torch.float32, "replay"), grads(torch.bfloat16, "replay")
    monkeypatch.setattr(decoder, "TILE_BYTES", 0)
    monkeypatch.setattr(decoder, "LEAST_ROWS", 4)
    tiled = grads(torch.bfloat16, "replay")

    def distance(other: dict[str, Tensor]) -> float:
        return sum(float((other[n] - exact[n]).norm() ** 2 / exact[n].norm() ** 2) for n in exact) ** 0.5

    assert 0 < distance(tiled) < 1.2 * distance(whole)
