"""Tiny models of many architectures, each with a batch and a loss.

A case builds a seeded fp32 model on the CPU (hidden size 32, two to four layers, random weights)
and feeds it batches that depend on the step alone. transformers' own defaults are kept where they
make streaming harder: dropout, caches, tied heads, router losses collected by hooks.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

V, H, T = 128, 32, 12       # vocabulary, hidden size, tokens per row
B = 2                       # rows per batch


class Chain(nn.Module):
    """Layers one after another, each a unit of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def update(loss: Tensor, opt: torch.optim.Optimizer) -> Tensor:
    """The loss."""
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def model_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).loss


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss: Callable[[nn.Module, dict[str, Any]], Tensor] = model_loss
    notes: str = ""

    def script(self, trial: Any) -> None:
        """The ordinary loop: see parity.py."""
        trial.train(trial.stream(self.build()), self.batch, self.loss)


CASES: dict[str, Case] = {}


def add(name: str, build: Callable[[], nn.Module], batch: Callable[[int], dict[str, Any]],
        loss: Callable[[nn.Module, dict[str, Any]], Tensor] = model_loss, notes: str = "") -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, build, batch, loss, notes)


# ---------------------------------------------------------------- batches

def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens(g: torch.Generator, rows: int = B, length: int = T, low: int = 4, high: int = V) -> Tensor:
    return torch.randint(low, high, (rows, length), generator=g)


def text(step: int) -> dict[str, Tensor]:
    """Labels are the inputs; the first row of every other batch is padded on the right."""
    ids = tokens(generator(step))
    out = {"input_ids": ids, "labels": ids.clone()}
    if step % 2:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        out["attention_mask"] = mask
        out["labels"][0, -3:] = -100
    return out


def text_unpadded(step: int) -> dict[str, Tensor]:
    ids = tokens(generator(step))
    return {"input_ids": ids, "labels": ids.clone()}


def seq2seq(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"input_ids": tokens(g), "labels": tokens(g, length=T - 4)}


def pixels(size: int, labels: int = 5, channels: int = 3) -> Callable[[int], dict[str, Tensor]]:
    def batch(step: int) -> dict[str, Tensor]:
        g = generator(step)
        return {"pixel_values": torch.randn(B, channels, size, size, generator=g),
                "labels": torch.randint(0, labels, (B,), generator=g)}
    return batch


# ---------------------------------------------------------------- builders

def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return make().float().train()
    return build


def from_config(auto: str, model_type: str, **config: Any) -> Callable[[], nn.Module]:
    """`AutoModelFor<auto>` of a config; transformers is imported when the case runs."""
    def make() -> nn.Module:
        import transformers
        return getattr(transformers, f"AutoModelFor{auto}" if auto else "AutoModel").from_config(
            transformers.AutoConfig.for_model(model_type, **config))
    return seeded(make)


DECODER = dict(vocab_size=V, hidden_size=H, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def decoder(name: str, model_type: str | None = None, batch: Callable[[int], dict[str, Any]] = text,
            notes: str = "", without: tuple[str, ...] = (), **config: Any) -> None:
    base = {k: v for k, v in DECODER.items() if k not in without}
    add(name, from_config("CausalLM", model_type or name, **{**base, **config}), batch, notes=notes)


# ---------------------------------------------------------------- decoders

decoder("llama")
decoder("llama_tied", "llama", tie_word_embeddings=True, notes="head and embedding are one parameter")
decoder("llama_eager", "llama", attn_implementation="eager", attention_dropout=0.1)
decoder("mistral", sliding_window=6)
decoder("qwen2", tie_word_embeddings=True)
decoder("qwen3", head_dim=8)
decoder("gemma", head_dim=8)
decoder("gemma2", head_dim=8, sliding_window=6, query_pre_attn_scalar=8, notes="logit soft caps")
decoder("gemma3_text", head_dim=8, sliding_window=6, query_pre_attn_scalar=8, sliding_window_pattern=2)
decoder("phi3", partial_rotary_factor=1.0)
decoder("phi", notes="dropout by default")
decoder("stablelm", use_qkv_bias=True)
decoder("cohere", logit_scale=0.5)
decoder("cohere2", sliding_window=6)
decoder("granite", embedding_multiplier=2.0, residual_multiplier=0.5)
decoder("olmo2")
decoder("smollm3", no_rope_layer_interval=2)
decoder("starcoder2", notes="dropout in attention and residual", residual_dropout=0.1, embedding_dropout=0.1)
decoder("glm4", head_dim=8)
decoder("nemotron")
decoder("helium", head_dim=8)
decoder("exaone4", sliding_window=6, sliding_window_pattern=2)
decoder("gpt_neox", without=("num_key_value_heads",), hidden_dropout=0.1)
decoder("falcon", without=("num_key_value_heads", "intermediate_size"), new_decoder_architecture=True,
        num_kv_heads=2, alibi=False)
decoder("bloom", without=("num_attention_heads", "num_hidden_layers", "intermediate_size", "num_key_value_heads",
                          "max_position_embeddings"), n_layer=3, n_head=4, notes="alibi; tied head")
decoder("gpt2", without=tuple(DECODER), vocab_size=V, n_embd=H, n_layer=3, n_head=4, n_positions=64,
        bos_token_id=1, eos_token_id=2, notes="dropout everywhere; tied head; Conv1D")
decoder("gptj", without=tuple(DECODER), vocab_size=V, n_embd=H, n_layer=3, n_head=4, n_positions=64, rotary_dim=4,
        bos_token_id=1, eos_token_id=2, attn_pdrop=0.1)
decoder("gpt_neo", without=tuple(DECODER), vocab_size=V, hidden_size=H, num_layers=2, num_heads=4, window_size=6,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
decoder("opt", without=("intermediate_size", "num_key_value_heads"), ffn_dim=64, word_embed_proj_dim=16,
        notes="dropout; projections around the layers; head reads the embedding outside its module")

# ---------------------------------------------------------------- mixtures of experts

decoder("mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, sliding_window=None,
        notes="router logits escape the layer into the auxiliary loss")
decoder("qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1,
        shared_expert_intermediate_size=32, output_router_logits=True)
decoder("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, head_dim=8,
        output_router_logits=True)
decoder("olmoe", num_experts=4, num_experts_per_tok=2, output_router_logits=True)
decoder("granitemoe", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
decoder("phimoe", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, sliding_window=None)
decoder("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, output_router_logits=True, sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, notes="attention sinks are bare parameters")
decoder("deepseek_v3", num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, notes="latent attention; one dense layer first")
decoder("llama4_text", intermediate_size_mlp=64, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=8, moe_layers=[1], notes="chunked attention; reads dtypes of weights often")

# ---------------------------------------------------------------- state spaces and hybrids

decoder("mamba", without=tuple(DECODER), batch=text_unpadded, vocab_size=V, hidden_size=H, num_hidden_layers=3,
        state_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, notes="bare parameters A_log and D")
decoder("mamba2", without=tuple(DECODER), batch=text_unpadded, vocab_size=V, hidden_size=H, num_hidden_layers=2,
        num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
decoder("bamba", batch=text_unpadded, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_n_groups=1, mamba_chunk_size=8)
decoder("falcon_h1", batch=text_unpadded, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=64,
        mamba_n_groups=1, mamba_chunk_size=8, head_dim=8)
decoder("zamba2", batch=text_unpadded, num_hidden_layers=4, mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=4,
        chunk_size=8, num_mem_blocks=1, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], adapter_rank=4,
        hybrid_layer_ids=[1, 3], notes="one attention block shared by two layers")
decoder("jamba", batch=text_unpadded, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2,
        expert_layer_period=2, expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False, output_router_logits=True)
decoder("qwen3_next", batch=text_unpadded, num_hidden_layers=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"], output_router_logits=True)
decoder("lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=8, full_attn_idxs=[1])
decoder("recurrent_gemma", batch=text_unpadded, num_hidden_layers=3, lru_width=H, attention_window_size=6, head_dim=8,
        block_types=["recurrent", "recurrent", "attention"], num_key_value_heads=1)

# ---------------------------------------------------------------- encoders

ENCODER = dict(vocab_size=V, hidden_size=H, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
               max_position_embeddings=64, pad_token_id=0)


def encoder(name: str, auto: str = "MaskedLM", notes: str = "", batch: Callable[[int], dict[str, Any]] = text,
            **config: Any) -> None:
    add(name, from_config(auto, name, **{**ENCODER, **config}), batch, notes=notes)


def classified(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"input_ids": tokens(g), "labels": torch.randint(0, 2, (B,), generator=g)}


encoder("bert", notes="tied head inside a prediction block")
encoder("roberta", notes="position ids from padding", max_position_embeddings=80)
encoder("electra", embedding_size=16)
encoder("deberta-v2", relative_attention=True, max_relative_positions=16,
        pos_att_type=["p2c", "c2p"], position_buckets=8, notes="one relative embedding is read by every layer")
encoder("albert", embedding_size=16, num_hidden_layers=3, notes="one layer, called three times")
encoder("distilbert", auto="SequenceClassification", batch=classified, dim=H, hidden_dim=64, n_layers=2, n_heads=4)
encoder("modernbert", local_attention=8, global_attn_every_n_layers=2, reference_compile=False, num_hidden_layers=3,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
encoder("mpnet")

# ---------------------------------------------------------------- encoder and decoder

add("t5", from_config("Seq2SeqLM", "t5", vocab_size=V, d_model=H, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                      decoder_start_token_id=0, relative_attention_num_buckets=8), seq2seq,
    notes="position bias of the first layer is used by the others")
add("bart", from_config("Seq2SeqLM", "bart", vocab_size=V, d_model=H, encoder_layers=2, decoder_layers=2,
                        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
                        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                        decoder_start_token_id=2, encoder_layerdrop=0.3), seq2seq,
    notes="three ties of one embedding; layer drop skips encoder layers at random")
add("pegasus", from_config("Seq2SeqLM", "pegasus", vocab_size=V, d_model=H, encoder_layers=2, decoder_layers=2,
                           encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
                           max_position_embeddings=64, decoder_start_token_id=0), seq2seq)


def whisper_batch(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"input_features": torch.randn(B, 8, 32, generator=g), "labels": tokens(g, length=6)}


add("whisper", from_config("SpeechSeq2Seq", "whisper", vocab_size=V, num_mel_bins=8, d_model=H, encoder_layers=2,
                           decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
                           decoder_ffn_dim=64, max_source_positions=16, max_target_positions=16, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                           begin_suppress_tokens=None, dropout=0.1), whisper_batch)

# ---------------------------------------------------------------- vision

IMAGE = dict(hidden_size=H, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)

add("vit", from_config("ImageClassification", "vit", **IMAGE, num_labels=5), pixels(16))
add("dinov2", from_config("ImageClassification", "dinov2", **IMAGE, num_labels=5, mlp_ratio=2, drop_path_rate=0.2),
    pixels(16), notes="stochastic depth; an unused mask token")
add("beit", from_config("ImageClassification", "beit", **IMAGE, num_labels=5), pixels(16))
add("swin", from_config("ImageClassification", "swin", image_size=16, patch_size=2, embed_dim=16, depths=[1, 1],
                        num_heads=[2, 4], window_size=4, num_labels=5), pixels(16))
add("convnext", from_config("ImageClassification", "convnext", num_stages=2, hidden_sizes=[16, 32], depths=[1, 1],
                            num_labels=5, image_size=32), pixels(32))
add("resnet", from_config("ImageClassification", "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
                          num_labels=5, layer_type="basic"), pixels(32), notes="BatchNorm statistics change in forward")


def clip_batch(step: int) -> dict[str, Any]:
    g = generator(step)
    ids = tokens(g, rows=3)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(3, 3, 16, 16, generator=g), "return_loss": True}


TOWERS = dict(text_config=dict(vocab_size=V, hidden_size=H, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                               max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, projection_dim=16),
              vision_config={**IMAGE, "projection_dim": 16})

add("clip", from_config("", "clip", **TOWERS, projection_dim=16), clip_batch, notes="logit_scale is a bare scalar of the root")
add("siglip", from_config("", "siglip", text_config={**TOWERS["text_config"], "projection_size": H},
                          vision_config=dict(IMAGE)), clip_batch, notes="torch's MultiheadAttention as the pooling head")

# ---------------------------------------------------------------- several kinds of input

IMAGE_TOKEN = 120


def llava_batch(step: int) -> dict[str, Tensor]:
    g = generator(step)
    ids = tokens(g, high=IMAGE_TOKEN)
    ids[:, 1:5] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(B, 3, 16, 16, generator=g)}


def llava() -> nn.Module:
    import transformers as tf
    config = tf.LlavaConfig(vision_config=tf.CLIPVisionConfig(**IMAGE), text_config=tf.LlamaConfig(**DECODER),
                            image_token_id=IMAGE_TOKEN, image_token_index=IMAGE_TOKEN, vision_feature_layer=-2,
                            vision_feature_select_strategy="default", image_seq_length=4)
    return tf.LlavaForConditionalGeneration(config)


add("llava", seeded(llava), llava_batch, notes="a vision tower's last layer goes unused: gradients stay None")


def paligemma() -> nn.Module:
    import transformers as tf
    config = tf.PaliGemmaConfig(vision_config=dict(model_type="siglip_vision_model", **IMAGE, vision_use_head=False),
                                text_config=dict(model_type="gemma", **{**DECODER, "head_dim": 8}),
                                image_token_index=IMAGE_TOKEN, projection_dim=H, hidden_size=H)
    return tf.PaliGemmaForConditionalGeneration(config)


def paligemma_batch(step: int) -> dict[str, Tensor]:
    batch = llava_batch(step)
    return {**batch, "token_type_ids": torch.ones_like(batch["input_ids"])}


add("paligemma", seeded(paligemma), paligemma_batch)


def qwen2_vl() -> nn.Module:
    import transformers as tf
    config = tf.Qwen2VLConfig(
        text_config=dict(**DECODER, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}),
        vision_config=dict(depth=2, embed_dim=H, hidden_size=H, num_heads=4, mlp_ratio=2, patch_size=4,
                           spatial_merge_size=2, temporal_patch_size=2),
        image_token_id=IMAGE_TOKEN, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
    return tf.Qwen2VLForConditionalGeneration(config)


def qwen2_vl_batch(step: int) -> dict[str, Tensor]:
    """Two images of 4 x 4 patches each; merged two by two they fill four tokens of the text."""
    g = generator(step)
    ids = tokens(g, high=IMAGE_TOKEN)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 122, IMAGE_TOKEN, 123
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
            "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=g), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


add("qwen2_vl", seeded(qwen2_vl), qwen2_vl_batch, notes="multimodal rotary positions; three-dimensional patches")

# ---------------------------------------------------------------- audio

AUDIO = dict(hidden_size=H, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, conv_dim=(16, 16),
             conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
             num_conv_pos_embedding_groups=4, vocab_size=V, pad_token_id=0, mask_time_length=2, mask_time_prob=0.2)


def audio_batch(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"input_values": torch.randn(B, 640, generator=g), "labels": tokens(g, length=5)}


add("wav2vec2", from_config("CTC", "wav2vec2", **AUDIO, layerdrop=0.2), audio_batch,
    notes="weight norm is a parametrization; masks from NumPy's generator; layer drop")
add("hubert", from_config("CTC", "hubert", **AUDIO), audio_batch)

# ---------------------------------------------------------------- what the others have not

add("xlnet", from_config("CausalLM", "xlnet", vocab_size=V, d_model=H, n_layer=2, n_head=4, d_inner=64, bos_token_id=1,
                         eos_token_id=2), text_unpadded, notes="two streams; biases of attention are bare parameters")
add("perceiver", from_config("MaskedLM", "perceiver", vocab_size=V, d_model=H, d_latents=H, num_latents=8, num_blocks=2,
                             num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
                             qk_channels=H, v_channels=H, max_position_embeddings=T), text_unpadded,
    notes="the same layers are called for each block; the head reads the embedding's weight")


def series_batch(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"past_values": torch.randn(B, 32, 2, generator=g), "future_values": torch.randn(B, 8, 2, generator=g)}


def patchtst() -> nn.Module:
    import transformers as tf
    return tf.PatchTSTForPrediction(tf.PatchTSTConfig(
        context_length=32, prediction_length=8, patch_length=8, patch_stride=4, num_input_channels=2, d_model=H,
        num_attention_heads=4, ffn_dim=64, num_hidden_layers=2))


add("patchtst", seeded(patchtst), series_batch, notes="BatchNorm between layers; a distribution's likelihood")


def segments(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"pixel_values": torch.randn(B, 3, 32, 32, generator=g), "labels": torch.randint(0, 5, (B, 32, 32), generator=g)}


add("segformer", from_config("SemanticSegmentation", "segformer", num_labels=5, depths=[1, 1, 1, 1], drop_path_rate=0.2,
                             hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 1, 1],
                             decoder_hidden_size=H), segments, notes="four stages are read by one head")


def frames(step: int) -> dict[str, Tensor]:
    g = generator(step)
    return {"pixel_values": torch.randn(B, 4, 3, 16, 16, generator=g), "labels": torch.randint(0, 5, (B,), generator=g)}


add("videomae", from_config("VideoClassification", "videomae", **IMAGE, num_frames=4, tubelet_size=2, num_labels=5), frames)
