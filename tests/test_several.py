"""Several processes on the CPU device: the bits of one process to which their micro-batches come in turns."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from several import Job, Pool, alone, differences

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "gpt_oss", "deepseek_v3", "mamba", "bert", "t5",
                 "vit")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as made:
        yield made


def check(pool: Pool, size: int, job: Job) -> None:
    assert not differences(pool.call("several:train", size, job), alone(job, size))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_are_as_one(pool: Pool, name: str) -> None:
    check(pool, 2, Job(name))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_number_of_any_type(pool: Pool, size: int, dtype: str) -> None:
    check(pool, size, Job("wide", dtype, reduce="sum" if size == 3 else "mean", delay_us=200))
