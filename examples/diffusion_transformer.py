#!/usr/bin/env python3
"""Train a diffusion transformer by flow matching: Stable Diffusion 3's, from diffusers.

    python examples/diffusion_transformer.py stabilityai/stable-diffusion-3.5-large latents/
    python examples/diffusion_transformer.py --tiny          # a random model, in seconds

The data is a folder of .safetensors files, one for an image, with what the other parts of the
pipeline made of it, once: "latents" [C, H, W] (VAE, scaled and shifted), "prompt" [L, D] and "pooled"
[P] (text encoders). So only the transformer is in memory. Any module streams like this: mt.stream
finds its blocks.

Source: Esser et al. 2024 (arXiv 2403.03206): z = (1 - s) x + s e, the model predicts e - x, and s is
drawn as the sigmoid of a normal number.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file

import megatrain_torch as mt

TINY = dict(steps=30, images=8, lr=3e-3, out=Path("runs/tiny_diffusion"))
NOISE_STEPS = 1000  # the model is given s as s * NOISE_STEPS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a pipeline's folder, or its name on the hub")
    parser.add_argument("data", nargs="?", type=Path, help="folder of .safetensors")
    parser.add_argument("--out", type=Path, default=Path("runs/diffusion"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--images", type=int, default=32, help="of a step")
    parser.add_argument(
        "--micro", type=int, default=1, help="micro-batches that a step is cut into"
    )
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--states", default="fp32", help='"8bit": moments in a quarter of the bytes'
    )
    parser.add_argument("--vram", help='limit of device memory, as "24GiB"')
    parser.add_argument("--tiny", action="store_true", help="a random model; no other argument")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.tiny and args.data is None:
        parser.error("a model and data are needed, or --tiny")
    if args.images % args.micro:
        parser.error(f"{args.images} images cannot be cut into {args.micro} equal micro-batches")
    return args


def tiny_model(folder: Path) -> str:
    """A pipeline's folder with a random transformer in it."""
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    model.save_pretrained(folder / "transformer")
    return str(folder)


def tiny_data(folder: Path) -> Path:
    """Latents that are their prompt's first numbers, in stripes."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(16):
        prompt, pooled = torch.randn(6, 32), torch.randn(32)
        latents = pooled[:4, None, None] * torch.tensor([1.0, -1.0]).repeat(4)
        named = {
            "latents": latents.expand(4, 8, 8).contiguous(),
            "prompt": prompt,
            "pooled": pooled,
        }
        save_file(named, folder / f"{i}.safetensors")
    return folder


def batch_of(files: list[Path], many: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the files have of some images, drawn by chance, and noise of the amount s [many]."""
    images = [load_file(files[i]) for i in torch.randint(len(files), (many,)).tolist()]
    batch = {
        name: torch.stack([image[name] for image in images]).to(dtype)
        for name in ("latents", "prompt", "pooled")
    }
    noise = torch.randn(batch["latents"].shape).to(dtype)
    return batch | {"s": torch.sigmoid(torch.randn(many)), "noise": noise}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean square of what the prediction of e - x is off by."""
    s = batch["s"].view(-1, 1, 1, 1)
    z = ((1 - s) * batch["latents"] + s * batch["noise"]).to(batch["noise"].dtype)
    found = model(
        hidden_states=z,
        encoder_hidden_states=batch["prompt"],
        pooled_projections=batch["pooled"],
        timestep=batch["s"] * NOISE_STEPS,
    ).sample
    wanted = batch["noise"].float() - batch["latents"].float()
    return (found.float() - wanted.to(found.device)).square().mean()


def train(model: Any, files: list[Path], args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    opt = mt.AdamW(model.parameters(), lr=args.lr, max_grad_norm=1.0, states=args.states)
    losses = []
    for step in range(1, args.steps + 1):
        began, loss = time.perf_counter(), 0.0
        for _ in range(args.micro):
            part = (
                loss_of(model, batch_of(files, args.images // args.micro, model.dtype)) / args.micro
            )
            part.backward()
            loss += part.item()
        opt.step()
        opt.zero_grad()
        losses.append(loss)
        rate = args.images / (time.perf_counter() - began)
        print(f"step {step}  loss {loss:.3f}  norm {opt.grad_norm:.2f}  {rate:,.1f} images/s")
    return losses


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    if args.tiny:
        torch.set_num_threads(1)
        args.model, args.data = tiny_model(args.out / "random"), tiny_data(args.out / "latents")
    files = sorted(args.data.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{args.data}: no .safetensors there")
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = SD3Transformer2DModel.from_pretrained(
        args.model, subfolder="transformer", torch_dtype=dtype
    )
    model = mt.stream(model, vram=args.vram)
    losses = train(model, files, args)
    model.save_pretrained(args.out / "transformer")
    tenth = max(1, len(losses) // 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    print(f"loss {first:.3f} at first, {last:.3f} at last; {args.out / 'transformer'}")


if __name__ == "__main__":
    main()
