"""Cards by name, in a host as such cards have: fields of a machine.Machine, with the rates that data sheets publish,
that were measured, or that are taken. Plain data; machine.py makes machines of it.
"""
from __future__ import annotations

from typing import Any

GIB = 2**30

# Between GPUs, of two H200 (NVLink 4, NCCL 2.28): 1 GiB is all-reduced at 321 GB/s, where 450 are on the data sheet.
NVLINK_REACHED = 0.7
PCIE_REACHED = 0.8          # of a link's rate, by copies one way: 25 of 31.5 GB/s, 55 of 63
PCIE = {3: 15.8, 4: 31.5, 5: 63.0}      # GB/s one way of 16 lanes
NO_LINKS = {"exchange_gbps": 0.0, "whole_gbps": 0.0}    # between GPUs of a machine; and nobody measured several

# Rates of a layer's products on an H200, sustained, in whole steps' own runs (benchmarks/results): width of
# 7B, 8k tokens 734, 16k 705, 32k 706, 64k 658 (the card slows down under its power limit). Single products
# of that width: 819 to 837 cold; of 14B's 740 to 758, of 32B's 700. Widths of 1024 and tokens below 8192 are
# estimates; `megatrain doctor` measures them.
_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_H200_GEMM = tuple((n, width, rate) for width, row in {
    1024: (190.0, 300.0, 400.0, 480.0, 530.0, 550.0, 560.0, 560.0),
    3584: (300.0, 480.0, 600.0, 690.0, 730.0, 710.0, 705.0, 655.0),
    8192: (360.0, 560.0, 670.0, 720.0, 740.0, 710.0, 710.0, 662.0),
    12288: (370.0, 570.0, 670.0, 690.0, 700.0, 675.0, 670.0, 650.0),
}.items() for n, rate in zip(_TOKENS, row))
_H200_TFLOPS = 989.0        # of its data sheet

# cuDNN attention through torch, causal, heads of 128. Measured: S=4096, 40 heads, 616 / 500; 28/4 heads, sustained
# (at the power limit; 683 / 574 cold), S=32k 583 / 522; from 128k, forward some queries at a time (attention.by_rows),
# full blocks of 32k: 592 to 600 / 535. Below 4096: estimates.
_H200_ATTENTION = ((512, 180.0, 140.0), (1024, 300.0, 240.0), (2048, 450.0, 380.0), (4096, 616.0, 500.0),
                   (32768, 583.0, 522.0), (131072, 585.0, 535.0), (524288, 588.0, 535.0))

_H200: dict[str, Any] = {
    "name": "h200-128g", "device": "cuda", "source": "measured in part",
    "vram_bytes": int(139.8 * GIB),         # what the driver gives of 141 GB
    "vram_overhead_bytes": int(0.87 * GIB),  # measured: used on the device beyond what torch reserved, 0.85 to 0.86
    "host_bytes": 125 * GIB,                # a virtual machine of 128 GiB shows 126
    "host_overhead_bytes": 2 * GIB,         # resident beyond the store: 0.9 GB, and what torch had before
    "gemm": _H200_GEMM, "attention": _H200_ATTENTION,
    "hbm_gbps": 3900.0,                     # 4.8 TB/s by the data sheet; copies reach 4.0 to 4.3
    "h2d_gbps": 55.5, "d2h_gbps": 55.4, "both_gbps": 50.75,     # measured, PCIe 5 x16, pinned
    "busy_gbps": 38.0,                      # measured both ways: 40.6 beside 8 threads on memory, 37 beside 16
    "adam_gparams": ((1, 0.70), (8, 5.2), (16, 7.05)),          # measured at 1 and 16 threads
    "add_gparams": 11.0,                    # 16 bytes a gradient at the 183 GB/s that AdamW reaches there
    "device_adam_gparams": 140.0,           # 28 bytes a parameter at hbm_gbps
    "launch_us": 6.0,                       # eager layers: 500 to 630 us for some 90 operations, measured
    "whole_gbps": 50.4,                     # two GPUs at once
    "exchange_gbps": NVLINK_REACHED * 450,
}


def _like_h200(name: str, vram: float, host: int, gemm: tuple[float, float], attention: float = 1.0,
               taken: float = 0.87, **rates: Any) -> dict[str, Any]:
    """vram, of it taken, host: GiB. gemm: the share of the H200's rates, and TFLOP/s at most; attention: the share."""
    by, top = gemm
    return _H200 | {
        "name": name, "vram_bytes": int(vram * GIB), "vram_overhead_bytes": int(taken * GIB), "host_bytes": host * GIB,
        "gemm": tuple((n, w, round(min(rate * by, top), 1)) for n, w, rate in _H200_GEMM),
        "attention": tuple((s, round(f * attention, 1), round(b * attention, 1)) for s, f, b in _H200_ATTENTION),
        "source": "from data sheets, not measured"} | rates


# A host: GiB; AdamW's 10**9 parameters/s on one thread and on all; beside AdamW copies reach such a share of the link.
_HOSTS = {"desk-ddr4": (62, ((1, 0.8), (16, 1.8)), 0.5), "desk": (62, ((1, 1.0), (16, 2.4)), 0.6),
          "cloud": (62, ((1, 0.6), (8, 3.0)), 0.7), "server": (250, ((1, 0.6), (32, 6.5)), 0.75),
          "arm": (59, ((1, 0.3), (20, 3.0)), 0.4)}


def _by_sheet(name: str, vram: float, taken: float, tflops: float, gbps: float, link: float, host: str, share: float,
              **rates: Any) -> dict[str, Any]:
    """A card by its published figures, see CARDS. Small products reach more of a small card's peak than of the
    H200's, which launches cost more: twice its curve, up to `share` of the peak."""
    (gib, adam, busy), of_h200, link = _HOSTS[host], tflops / _H200_TFLOPS, link * PCIE_REACHED
    hbm = gbps * (0.82 if gbps > 1500 and "rtx" not in name else 0.89)
    return _like_h200(
        name, vram, gib, (2 * share * of_h200, share * tflops), 1.4 * share * of_h200, taken, hbm_gbps=round(hbm, 1),
        h2d_gbps=round(link, 1), d2h_gbps=round(link, 1), both_gbps=round(0.87 * link, 1),
        busy_gbps=round(busy * link, 1), adam_gparams=adam, add_gparams=round(1.6 * adam[-1][1], 1),
        device_adam_gparams=round(hbm / 28, 1), launch_us=5.0, **NO_LINKS, **rates)


_OLDER = {"fp8_gain": 0.0}      # tensor cores below compute capability 8.9 multiply no codes of 8 bits

CARDS: tuple[dict[str, Any], ...] = (
    _H200,
    # The same GPU in a host of two sockets: 64 vCPUs measured 224 GB/s of memory, 8.0 G parameters/s.
    _H200 | {"name": "h200-1.5t", "host_bytes": 1500 * GIB, "adam_gparams": ((1, 0.70), (64, 8.0))},
    # H100 SXM: the H200's cores with 3.35 TB/s (data sheet) of 80 GB; the host is taken to have 256 GiB.
    _like_h200("h100-80g", 79.1, 250, (0.96, 720.0), hbm_gbps=2750.0, device_adam_gparams=98.0),
    # Schieffer et al. 2024 (arXiv 2407.07850) measured 375 up, 297 down over NVLink-C2C, 486 GB/s of LPDDR5X
    # and 3.4 TB/s of HBM3. Host memory and link share the LPDDR5X. AdamW: 26 bytes at 80 % of it.
    _like_h200("gh200-480g", 94, 470, (0.97, 720.0), hbm_gbps=3100.0, h2d_gbps=375.0, d2h_gbps=297.0, both_gbps=280.0,
               busy_gbps=100.0, adam_gparams=((1, 0.70), (72, 15.0)), add_gparams=24.0, device_adam_gparams=110.0,
               **NO_LINKS),
    # RTX 4090: 165 TFLOP/s dense bf16 with fp32 sums, 1,008 GB/s (data sheet), PCIe 4 x16; two channels of
    # DDR5, some 65 GB/s, so 2.4 G parameters/s. Products are taken to reach 90 % of the sheet.
    _like_h200("rtx4090-64g", 23.6, 62, (0.30, 150.0), 0.22, 0.6, hbm_gbps=900.0, h2d_gbps=25.0, d2h_gbps=25.0,
               both_gbps=22.0, busy_gbps=16.0, adam_gparams=((1, 1.0), (16, 2.4)), add_gparams=4.0,
               device_adam_gparams=32.0, launch_us=4.0, **NO_LINKS),
    # RTX 5090: 210 TFLOP/s dense bf16 with fp32 sums, 1,792 GB/s, 32 GB (data sheet), PCIe 5 x16; host as above
    # with faster DDR5.
    _like_h200("rtx5090", 31.4, 62, (0.38, 190.0), 0.28, 0.6, hbm_gbps=1600.0, h2d_gbps=54.0, d2h_gbps=54.0,
               both_gbps=48.0, busy_gbps=25.0, adam_gparams=((1, 1.1), (16, 2.8)), add_gparams=4.5,
               device_adam_gparams=57.0, launch_us=4.0, **NO_LINKS),
    # RTX 3090: 71 TFLOP/s dense bf16 with fp32 sums, 936 GB/s (data sheet), PCIe 4 x16; host as of the 4090 with DDR4,
    # 50 GB/s. Products as there.
    _like_h200("rtx3090-64g", 23.6, 62, (0.13, 64.0), 0.1, 0.6, hbm_gbps=840.0, h2d_gbps=25.0, d2h_gbps=25.0,
               both_gbps=20.0, busy_gbps=13.0, adam_gparams=((1, 0.8), (16, 1.8)), add_gparams=3.0,
               device_adam_gparams=30.0, launch_us=5.0, **NO_LINKS, **_OLDER),
    # A100 SXM: 312 TFLOP/s dense bf16, 2,039 GB/s of 80 GB (data sheet), PCIe 4 x16; products are taken to reach 80 %
    # of the sheet, and the host to have 512 GiB and 180 GB/s.
    _like_h200("a100-80g", 79.1, 500, (0.35, 250.0), 0.35, hbm_gbps=1700.0, h2d_gbps=25.0, d2h_gbps=25.0,
               both_gbps=22.0, busy_gbps=20.0, adam_gparams=((1, 0.6), (32, 6.5)), add_gparams=10.0,
               device_adam_gparams=60.0, whole_gbps=0.0, exchange_gbps=NVLINK_REACHED * 300, **_OLDER),
    # B200: 2,250 TFLOP/s dense bf16 at 1,000 W, 8 TB/s of 192 GB, of which the driver gives 179 GiB (data sheet), in a
    # host of PCIe 5 with 2 TiB. Products are taken to reach what they reach on the H200, 75 % of its sheet.
    _like_h200("b200-2t", 179, 2000, (2.27, 1690.0), 1.8, hbm_gbps=6500.0, device_adam_gparams=235.0,
               adam_gparams=((1, 0.70), (64, 9.0)), add_gparams=14.0, whole_gbps=0.0,
               exchange_gbps=NVLINK_REACHED * 900),
    # By their sheets: GiB that the driver gives, and of them taken by it and libraries; 10**12 operations/s of dense
    # bf16 products with fp32 sums, without sparsity (V100, T4: fp16); GB/s of its memory, and one way of its link;
    # host; the share of operations that products are taken to reach, less where the power limit is low.
    _by_sheet("rtx3060-12g", 11.6, 0.6, 25.5, 360.0, PCIE[4], "desk-ddr4", 0.9, **_OLDER),
    _by_sheet("rtx4080", 15.6, 0.6, 97.5, 716.8, PCIE[4], "desk", 0.9),
    _by_sheet("t4", 14.6, 0.4, 65.0, 320.0, PCIE[3], "cloud", 0.5, **_OLDER),           # 70 W
    _by_sheet("l4", 22.0, 0.5, 121.0, 300.0, PCIE[4], "cloud", 0.5),                    # 72 W
    _by_sheet("a10", 22.0, 0.5, 125.0, 600.0, PCIE[4], "cloud", 0.6, **_OLDER),         # 150 W
    _by_sheet("v100-16g", 15.7, 0.5, 125.0, 900.0, PCIE[3], "server", 0.75, **_OLDER),
    _by_sheet("v100-32g", 31.7, 0.5, 125.0, 900.0, PCIE[3], "server", 0.75, **_OLDER),
    _by_sheet("a6000", 47.4, 0.6, 154.8, 768.0, PCIE[4], "desk", 0.8, **_OLDER),
    _by_sheet("rtx6000-ada", 47.4, 0.6, 364.2, 960.0, PCIE[4], "desk", 0.75),
    _by_sheet("rtx-pro-6000", 94.9, 0.7, 503.8, 1792.0, PCIE[5], "desk", 0.75),
    _by_sheet("l40s", 44.4, 0.6, 362.05, 864.0, PCIE[4], "server", 0.7),
    _by_sheet("a100-40g", 39.4, 0.6, 312.0, 1555.0, PCIE[4], "server", 0.8, **_OLDER),
    _by_sheet("h100-pcie", 79.1, 0.7, 756.0, 2000.0, PCIE[5], "server", 0.7),
    # GB10 (DGX Spark): a Blackwell GPU and 20 Arm cores on one memory of 128 GB, 273 GB/s (data sheet), of which the
    # system shows 119 GiB. It is parted into two, and copies between the parts read and write the same memory. 31
    # TFLOP/s of fp32 are published; of bf16 twice that with fp32 sums is taken, as GeForce cards of its kind have.
    _by_sheet("gb10", 59.0, 0.5, 62.0, 273.0, 0.0, "arm", 0.9)
    | {"h2d_gbps": 100.0, "d2h_gbps": 100.0, "both_gbps": 50.0, "busy_gbps": 40.0, "one_memory": True},
    # The CPU device, for trying things: "device" memory is host memory.
    {"name": "cpu", "device": "cpu", "vram_bytes": 8 * GIB, "vram_overhead_bytes": 0, "host_bytes": 8 * GIB,
     "host_overhead_bytes": GIB // 2, "gemm": ((64, 256, 0.05), (64, 4096, 0.08), (4096, 256, 0.08), (4096, 4096, 0.1)),
     "attention": ((64, 0.02, 0.02), (4096, 0.05, 0.05)), "hbm_gbps": 10.0, "h2d_gbps": 5.0, "d2h_gbps": 5.0,
     "both_gbps": 4.0, "busy_gbps": 3.0, "adam_gparams": ((1, 0.5), (2, 0.8)), "add_gparams": 0.5,
     "device_adam_gparams": 0.5, "launch_us": 10.0, "fp8_gain": 1.0, "one_memory": True},
)

# What torch calls a GPU. What is looked for first comes first: an "A100" of 40 GB before any A100.
CALLED = (("gh200", "gh200-480g"), ("gb10", "gb10"), ("h200", "h200-128g"), ("h100 pcie", "h100-pcie"),
          ("h100", "h100-80g"), ("b200", "b200-2t"), ("a100 .*40gb", "a100-40g"), ("a100", "a100-80g"),
          ("rtx pro 6000", "rtx-pro-6000"), ("rtx 6000 ada", "rtx6000-ada"), ("a6000", "a6000"), ("l40s", "l40s"),
          ("l4", "l4"), ("a10g?", "a10"), ("t4", "t4"), ("v100 .*32gb", "v100-32g"), ("v100", "v100-16g"),
          ("5090", "rtx5090"), ("4090", "rtx4090-64g"), ("4080", "rtx4080"), ("3090", "rtx3090-64g"),
          ("3060", "rtx3060-12g"))
