"""What `megatrain doctor` measures between GPUs, on two of them or more."""
from __future__ import annotations

import pytest
import torch

from megatrain_torch.plans import doctor
from megatrain_torch.plans.machine import MACHINES

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_two_gpus_fetch_at_once_and_exchange() -> None:
    """Two links to the host carry most of what one does, where the host's memory reaches. An exchange holds up what
    is computed by no more than some times what it takes by itself."""
    device = torch.device("cuda")
    alone = doctor.copy_rates(device, doctor.CUDA.copy_bytes, doctor.CUDA.least_s)
    found = doctor.measure_links("cuda", 2)
    assert 0.4 * alone["h2d_gbps"] < found["whole_gbps"] < 1.1 * alone["h2d_gbps"]
    assert found["exchange_gbps"] > 0.1 * found["whole_gbps"] and found["lost_gbps"] > 0.1 * found["exchange_gbps"]
    assert doctor.linked(MACHINES["h200-128g"], found).exchange_gbps == float(f"{found['exchange_gbps']:.4g}")
