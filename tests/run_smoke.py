#!/usr/bin/env python3
"""An installed megatrain_torch trains, and computes what torch does. Needs torch and nothing else; no pytest.

    python tests/run_smoke.py [--cuda]      # --cuda: on the GPU, with a build that has CUDA

tools/wheels.py runs it on each wheel, the Dockerfile on each image. A few seconds.
"""
from __future__ import annotations

import argparse
from importlib import metadata

import torch
from torch import Tensor, nn

import megatrain_torch as mt
from megatrain_torch import _core, ops

WIDTH, LAYERS, STEPS = 64, 4, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net["layers"]:
            x = x + layer(x)
        return x.square().mean()


def losses(model: nn.Module, opt: torch.optim.Optimizer, device: str) -> list[float]:
    found = []
    for step in range(STEPS):
        loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        found.append(loss.item())
    return found


def check(device: str) -> None:
    """The first loss before any update has torch's bits; later ones differ by the optimizer's roundings."""
    plain, model = Model().to(device), mt.stream(Model(), device, compute="eager")
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0), device)
    found = losses(model, mt.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), device)
    if found[0] != want[0] or max(abs(a - b) / a for a, b in zip(want, found)) > 1e-5:
        raise SystemExit(f"{device}: losses {found}, torch's {want}")
    x = torch.randn(4, WIDTH, device=device)
    y = ops.rms_norm(x, torch.ones(WIDTH, device=device), 1e-6)[0]
    torch.testing.assert_close(y, nn.functional.rms_norm(x, (WIDTH,), eps=1e-6))
    mt.unstream(model)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--cuda", action="store_true", help="on the GPU too")
    wanted = ask.parse_args().cuda
    known = metadata.version("megatrain-torch")
    if known != mt.__version__:
        raise SystemExit(f"the distribution is {known}, the core says {mt.__version__}")
    if "+" in known and known.partition("+")[2].startswith("cuda") != _core.build_info()["cuda"]:
        raise SystemExit(f"{known}, and its core {_core.build_info()}")
    for device in ["cpu", *["cuda"] * wanted]:
        check(device)
    print(f"megatrain_torch {known}, torch {torch.__version__}: trains on {'CPU and GPU' if wanted else 'the CPU'}")


if __name__ == "__main__":
    main()
