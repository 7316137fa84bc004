"""One training step by three engines: streamed (ours), resident (plain torch), fsdp2 (PyTorch's).

Each is made from an ordinary model on the CPU, or what with_loss makes of it, and has
    backward(ids, share)   forward and backward of a micro-batch, its gradient times `share`
    update()               clipping and the optimizer; may return before they are done
    finish()               waits for everything
`mark` is called between forward and backward.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from common import synchronize
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from megatrain_torch.model.stream import runtime_of

CHUNK_TOKENS = 2048  # of the chunked loss: 152064 fp32 logits each make 1.2 GB


class Chunked(torch.nn.Module):
    """Tokens in, loss out: [B, S] int64 -> mean next-token cross-entropy, fp32.

    The head runs on CHUNK_TOKENS hidden states at a time, and again in backward, so that the logits never
    exist whole: what a user writes whose model's own loss does not fit.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids).last_hidden_state
        hidden, labels = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        chunks = zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True)
        return sum(self._checkpointed(h, y) for h, y in chunks) / len(labels)

    def _checkpointed(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            self._chunk_loss, hidden, labels, use_reentrant=False, preserve_rng_state=False
        )

    def _chunk_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


def with_loss(model: torch.nn.Module, args: Any) -> torch.nn.Module:
    """What is trained: the model itself, whose labels= path gives the loss, or that path in chunks."""
    return Chunked(model) if args.loss == "chunked" else model


class Engine:
    """Plain forward and backward; the subclasses say where things are and how they are updated."""

    model: torch.nn.Module
    device: torch.device
    opt: torch.optim.Optimizer | None

    def backward(
        self, ids: torch.Tensor, share: float = 1.0, mark: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        loss = self.loss_of(ids)
        mark()
        (loss * share).backward()
        return loss.detach()

    def loss_of(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.model, Chunked):
            return self.model(ids)
        return self.model(input_ids=ids, labels=ids).loss

    def update(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def finish(self) -> None:
        synchronize(self.device)

    def counts(self, steps: int) -> dict[str, float]:
        """What the engine itself counted since the last call, divided by `steps`."""
        return {}


def planned(model: Any, args: Any, layers: int | None = None) -> Any:
    """The mt.Plan that --plan asks for: the best, or the best with every unit in one place.

    Args:
        model: a module, or a config with `layers` of its layers.

    Raises:
        MegatrainError: Nothing that may be chosen fits.
    """
    import megatrain_torch as mt

    if args.plan == "arrive":
        plan = planned(model, argparse.Namespace(**vars(args) | {"plan": "ram"}), layers)
        guests = dict.fromkeys(list(plan.homes)[: args.guests], "arrive")
        return dataclasses.replace(plan, homes=plan.homes | guests)
    return mt.plan(
        model,
        tokens=args.tokens,
        seq=args.seq,
        vram=args.vram,
        micro=args.micro,
        homes=None if args.plan == "auto" else args.plan,
        activations=None if args.activations == "auto" else args.activations,
        compute=args.compute,
        layers=layers,
        states=args.states,
        host=args.host,
        nvme=args.nvme,
        grads=args.grads,
    )


class Streamed(Engine):
    """megatrain_torch: weights, fp32 masters and moments in host memory, or where a plan puts them.

    Args:
        plan: A mt.Plan; None: mt.stream's own choice.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Any,
        device: torch.device,
        optimizer: bool = True,
        plan: Any = None,
    ) -> None:
        import megatrain_torch as mt

        self.device = device
        self.last_step = mt.last_step
        self.model = mt.stream(
            model,
            device=device,
            plan=plan or (None if args.activations == "auto" else {"activations": args.activations}),
            vram=args.vram,
            host=args.host,
            compute=args.compute,
        )
        self.opt = None
        if optimizer:
            self.attach_optimizer(args)

    def attach_optimizer(self, args: Any) -> None:
        import megatrain_torch as mt

        self.opt = mt.AdamW(
            self.model.parameters(),
            lr=args.lr,
            weight_decay=0.1,
            max_grad_norm=args.clip or None,
            states=args.states,
            in_backward=args.grads == "none",
        )

    def update(self) -> None:
        if self.opt:
            self.opt.step()
        super().update()

    def finish(self) -> None:
        runtime_of(self.model).drain()
        super().finish()

    def counts(self, steps: int) -> dict[str, float]:
        last = self.last_step(self.model)
        return {
            "h2d_bytes": last.h2d_bytes / steps,
            "d2h_bytes": last.d2h_bytes / steps,
            "activations_out_bytes": last.out_bytes / steps,
            "activations_back_bytes": last.back_bytes / steps,
            "demand_fetches": last.demand_fetches / steps,
            "await_s": last.await_seconds / steps,
            "store_bytes": last.host_bytes,
        }


def checkpointed(model: torch.nn.Module) -> None:
    """Every layer recomputed in backward, by transformers' own switch."""
    inner = model.model if isinstance(model, Chunked) else model
    inner.gradient_checkpointing_enable({"use_reentrant": False})


class Resident(Engine):
    """The ordinary model on the device, fp32 masters beside it, updated by torch's fused AdamW."""

    def __init__(
        self, model: torch.nn.Module, args: Any, device: torch.device, optimizer: bool = True
    ) -> None:
        self.device = device
        self.clip = args.clip
        if args.activations in ("auto", "replay"):
            checkpointed(model)
        self.model = model.to(device)
        self.masters = [p.detach().float() for p in self.model.parameters()] if optimizer else []
        self.opt = (
            torch.optim.AdamW(self.masters, lr=args.lr, weight_decay=0.1, fused=True)
            if optimizer
            else None
        )

    @torch.no_grad()
    def update(self) -> None:
        if self.opt:
            parameters = list(self.model.parameters())
            for p, master in zip(parameters, self.masters, strict=True):
                master.grad, p.grad = p.grad.float(), None
            if self.clip:
                torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
            self.opt.step()
            self.opt.zero_grad()
            for p, master in zip(parameters, self.masters, strict=True):
                p.copy_(master)
        super().update()


class Fsdp2(Engine):
    """fully_shard in one process with CPU offload: fp32 parameters and states, bf16 compute."""

    def __init__(
        self, model: torch.nn.Module, args: Any, device: torch.device, optimizer: bool = True
    ) -> None:
        from torch import distributed
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self.device = device
        self.clip = args.clip
        cuda = device.type == "cuda"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # one process: no network is needed
        atexit.register(distributed.destroy_process_group)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=distributed.HashStore(),
            rank=0,
            world_size=1,
        )
        if args.activations in ("auto", "replay"):
            checkpointed(model)
        self.model = model
        options = {
            "mesh": distributed.init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy() if cuda else OffloadPolicy(),
        }
        inner = model.model if isinstance(model, Chunked) else model
        for part in (inner.model.embed_tokens, *inner.model.layers, inner.lm_head, model):
            fully_shard(part, **options)
        for name, buffer in model.named_buffers():  # parameters are offloaded, buffers are not
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(device))
        self.opt = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, weight_decay=0.1, fused=True
        )

    def update(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.opt.step()
        super().update()


ENGINES = {"streamed": Streamed, "resident": Resident, "fsdp2": Fsdp2}


def weight_dtype(name: str, device: torch.device) -> torch.dtype:
    """What the model is built in: FSDP2 casts fp32 parameters itself, the CPU device runs fp32."""
    return torch.float32 if name == "fsdp2" or device.type == "cpu" else torch.bfloat16
